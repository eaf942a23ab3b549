"""Chromium without a window, driven through pipes (DevTools protocol).

No package is needed, and no port is opened: Chromium reads commands from its
file descriptor 3 and writes answers and events to 4, each as JSON that ends
in a zero byte.
"""
from __future__ import annotations

import fcntl
import itertools
import json
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any

_OPTIONS = ('--headless=new', '--remote-debugging-pipe', '--no-sandbox',
            '--no-first-run', '--hide-scrollbars', '--disable-extensions',
            '--disable-component-update', '--disable-background-networking',
            '--window-size=1200,900')
_LIMIT = 120.0          # seconds for an answer


def program() -> str | None:
    """The path of Chromium or Chrome; None where there is none."""
    return next(filter(None, map(shutil.which, (
        'chromium', 'chromium-browser', 'google-chrome'))), None)


class Browser:
    """One page in a Chromium of its own.

    Use it in a ``with`` block, at whose end Chromium ends.

    Attributes:
        errors: What the page wrote to the console as warnings or errors,
            and its uncaught exceptions.
        requests: Addresses that the page asked for since :meth:`open`.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self._events: list[dict[str, Any]] = []
        self._read = b''

    def __enter__(self) -> Browser:
        path = program()
        if path is None:
            raise FileNotFoundError('there is no Chromium; install it with '
                                    '"apt-get install chromium"')
        self._folder = tempfile.TemporaryDirectory(
            ignore_cleanup_errors=True)
        theirs_in, self._in = os.pipe()
        self._out, theirs_out = os.pipe()
        # Above 4, so that neither is in the other's way.
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10)
                for end in (theirs_in, theirs_out)]
        self._process = subprocess.Popen(
            [path, *_OPTIONS, f'--user-data-dir={self._folder.name}',
             'about:blank'],
            pass_fds=(3, 4), stderr=subprocess.DEVNULL,
            preexec_fn=lambda: [os.dup2(end, number) for end, number in
                                zip(high, (3, 4), strict=True)] and None)
        for end in (theirs_in, theirs_out, *high):
            os.close(end)
        self._attach()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._session = {}
            self.call('Browser.close')
            self._process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def open(self, path: str | os.PathLike[str]) -> None:
        """Shows a file, and comes back when it has loaded."""
        self.errors.clear()
        self.requests.clear()
        self._events.clear()
        self.call('Page.navigate',
                  url=pathlib.Path(path).resolve().as_uri())
        self._wait_for('Page.loadEventFired')

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; of a promise, in the end."""
        answer = self.call('Runtime.evaluate', expression=script,
                           awaitPromise=True, returnByValue=True)
        if 'exceptionDetails' in answer:
            raise RuntimeError(_exception(answer['exceptionDetails']))
        return answer['result'].get('value')

    def drag(self, start: tuple[float, float], end: tuple[float, float]
             ) -> None:
        """Moves the mouse in ten steps while the left button is down."""
        self._mouse('mouseMoved', *start)
        self._mouse('mousePressed', *start, button='left', clickCount=1)
        for step in range(1, 11):
            self._mouse('mouseMoved', *(
                a + (b - a) * step / 10
                for a, b in zip(start, end, strict=True)), button='left')
        self._mouse('mouseReleased', *end, button='left', clickCount=1)

    def press(self, key: str, code: int) -> None:
        """Presses and releases a key, with its number in Windows."""
        text = {'text': '\r'} if key == 'Enter' else {}
        for kind in ('keyDown', 'keyUp'):
            self.call('Input.dispatchKeyEvent', type=kind, key=key, code=key,
                      windowsVirtualKeyCode=code,
                      **(text if kind == 'keyDown' else {}))

    def prefer(self, scheme: str) -> None:
        """Asks pages to be ``'light'`` or ``'dark'``."""
        self.call('Emulation.setEmulatedMedia', features=[
            {'name': 'prefers-color-scheme', 'value': scheme}])

    def size(self, width: int, height: int) -> None:
        """Gives the window so many pixels."""
        self.call('Emulation.setDeviceMetricsOverride', width=width,
                  height=height, deviceScaleFactor=1, mobile=False)

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Sends a command of the DevTools protocol.

        Raises:
            RuntimeError: Chromium answers with an error.
        """
        number = next(self._numbers)
        message = {'id': number, 'method': method, 'params': arguments,
                   **self._session}
        os.write(self._in, json.dumps(message).encode() + b'\0')
        while True:
            answer = self._next()
            if answer.get('id') == number:
                if 'error' in answer:
                    raise RuntimeError(f'{method}: {answer["error"]}')
                return answer.get('result', {})

    def _attach(self) -> None:
        targets = self.call('Target.getTargets')['targetInfos']
        page = next(target['targetId'] for target in targets
                    if target['type'] == 'page')
        self._session = {'sessionId': self.call(
            'Target.attachToTarget', targetId=page, flatten=True)[
                'sessionId']}
        for domain in ('Page', 'Runtime', 'Log', 'Network'):
            self.call(f'{domain}.enable')

    def _mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call('Input.dispatchMouseEvent', type=kind, x=x, y=y, **more)

    def _wait_for(self, method: str) -> None:
        while method not in (event['method'] for event in self._events):
            self._next()

    def _next(self) -> dict[str, Any]:
        """The next message, noted if it is an event."""
        limit = time.monotonic() + _LIMIT
        while b'\0' not in self._read:
            left = limit - time.monotonic()
            if not select.select([self._out], [], [], max(left, 0))[0]:
                raise TimeoutError('Chromium does not answer')
            data = os.read(self._out, 1 << 20)
            if not data:
                raise BrokenPipeError('Chromium has ended')
            self._read += data
        text, self._read = self._read.split(b'\0', 1)
        message = json.loads(text)
        if 'method' in message:
            self._note(message)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        details = event.get('params', {})
        method = event['method']
        self._events.append({'method': method})
        if method == 'Runtime.exceptionThrown':
            self.errors.append(_exception(details['exceptionDetails']))
        elif method == 'Runtime.consoleAPICalled' and details['type'] in (
                'error', 'warning', 'assert'):
            self.errors.append(' '.join(str(argument.get(
                'value', argument.get('description')))
                for argument in details['args']))
        elif method == 'Log.entryAdded' and details['entry']['level'] in (
                'error', 'warning'):
            self.errors.append(details['entry']['text'])
        elif method == 'Network.requestWillBeSent':
            self.requests.append(details['request']['url'])


def _exception(details: dict[str, Any]) -> str:
    return details.get('exception', {}).get('description', details['text'])
