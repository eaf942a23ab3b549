"""What the form of partial sums costs in accuracy and in bytes.

    python benchmarks/partial_sums.py

fp8 gradients of P ranks go round a ring as the plans have it: a rank's own
contribution in fp8, sums of several in fp8 (``wire``), in float16 or in
float32, the mean in fp8.  Normal gradients, no MPI: all ranks are played by
this process.  The error is that of the mean against float64, root mean square
over that of the mean; ``of 50`` that of the average of 50 exchanges of the
same gradients, which error feedback makes smaller.
"""
from __future__ import annotations

import argparse

from chainer_fp8pipe.allreduce.bucket import Bucket
from chainer_fp8pipe.allreduce.frames import Frames
from chainer_fp8pipe.allreduce.plan import Opcode, ring
from chainer_fp8pipe.allreduce.rank_plan import program
from chainer_fp8pipe.allreduce.sums import FORMS
from chainer_fp8pipe.allreduce.uncompiled import Uncompiled
from chainer_fp8pipe.codecs import Fp8Ratio, Tensors

import numpy
from codec_updates import begin
from environment import describe

BYTES = {'wire': 1, 'float16': 2, 'float32': 4}


class Ring:
    """All ranks of a ring in one process.

    Args:
        ranks: How many.
        form: Of partial sums.
        size: Elements of each rank's gradient.
    """

    def __init__(self, ranks: int, form: str, size: int) -> None:
        self.ranks, self.form = ranks, form
        plan = ring(ranks)
        self.parts = [program(plan, rank) for rank in range(ranks)]
        parameter = numpy.random.default_rng(0).normal(
            0, 0.1, size).astype(numpy.float32)
        self.codecs = [Fp8Ratio(rank=rank) for rank in range(ranks)]
        self.tensors = [Tensors(['/x'], [
            numpy.random.default_rng((1, rank)).normal(
                0, 1, size).astype(numpy.float32)], [parameter])
            for rank in range(ranks)]
        self.mean = numpy.mean([tensors.gradients[0].astype(float)
                                for tensors in self.tensors], axis=0)
        self.frames = Frames(0, size, ranks, size)

    def exchange(self) -> numpy.ndarray:
        """The mean as every rank decodes it."""
        buckets = [Bucket(self.codecs[rank], self.tensors[rank],
                          self._encoded(rank)) for rank in range(self.ranks)]
        played = [Uncompiled(bucket, [(part, self.frames)], self.form,
                             self.ranks)
                  for bucket, part in zip(buckets, self.parts, strict=True)]
        result = numpy.empty_like(buckets[0].wire)
        for owner in range(self.ranks):
            self._round(buckets, played, owner)
            part = self.frames.part(owner, 0)
            result[part] = buckets[owner].wire[part]
        decoded = Tensors(['/x'], [numpy.empty(
            result.size, numpy.float32)], self.tensors[0].parameters)
        self.codecs[0].decode(decoded, result)
        return decoded.gradients[0].astype(float)

    def _encoded(self, rank: int) -> numpy.ndarray:
        tensors = self.tensors[rank]
        wire = numpy.empty(tensors.size, numpy.uint8)
        # One process: the largest q over all ranks is not asked for; equal
        # seeds and normal gradients make them nearly equal, and it is used
        # of rank 0.
        begin(self.codecs[rank], tensors, self._same)
        self.codecs[rank].encode(
            tensors, wire, 1 / self.ranks if self.form == 'wire' else 1.0)
        return wire

    def _same(self, found: numpy.ndarray) -> None:
        self._q = getattr(self, '_q', found.copy())
        found[...] = self._q

    def _round(self, buckets, played, owner):
        """A block goes round; its mean is then in its owner's wire."""
        part = self.frames.part(owner, 0)
        for step in range(1, self.ranks):
            sender, rank = ((owner + step + one) % self.ranks
                            for one in (0, 1))
            message = buckets[sender].wire[part]
            if step > 1 and self.form != 'wire':
                message = numpy.empty(message.size, self.form)
                played[sender].message(0, 0, self._position(
                    sender, Opcode.SEND_PARTIAL, owner), memoryview(message))
            played[rank].add(0, 0, self._position(
                rank, Opcode.RECEIVE_PARTIAL, owner), memoryview(message))
        played[owner].encode_sums(
            0, 0, self._position(owner, Opcode.ENCODE, owner), 0)

    def _position(self, rank, kind, block):
        return next(position for position, (action, *_)
                    in enumerate(self.parts[rank].steps)
                    if (action.kind, action.start) == (kind, block))


def bytes_sent(ranks: int, form: str) -> float:
    """Per rank and element, from the plan."""
    total = 0
    for step in program(ring(ranks), 0).steps:
        if step.action.kind is Opcode.SEND_PARTIAL and step.summed:
            total += BYTES[form]
        elif step.action.kind in (Opcode.SEND_PARTIAL, Opcode.SEND_RESULT):
            total += 1
    return total / ranks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--elements', type=int, default=20000, metavar='N')
    parser.add_argument('--exchanges', type=int, default=50, metavar='N')
    options = parser.parse_args()
    print(describe())
    print(f'{"ranks":>6}  {"sums in":<9}{"error":>8}'
          f'{f"of {options.exchanges}":>9}{"bytes/element":>15}')
    for ranks in (2, 4, 8, 16, 32, 64):
        for form in FORMS:
            played = Ring(ranks, form, options.elements)
            results = [played.exchange() for _ in range(options.exchanges)]
            errors = [numpy.linalg.norm(result - played.mean)
                      / numpy.linalg.norm(played.mean)
                      for result in (results[0], numpy.mean(results, 0))]
            print(f'{ranks:>6}  {form:<9}{errors[0]:>8.4f}{errors[1]:>9.4f}'
                  f'{bytes_sent(ranks, form):>15.3f}', flush=True)


if __name__ == '__main__':
    main()
