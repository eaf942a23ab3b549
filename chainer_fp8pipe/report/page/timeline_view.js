// The timeline of one update: what is drawn, moved and chosen.
'use strict';

const MOST_HEIGHT = 1000, ROW_HEIGHTS = [14, 52];
const TABLE_ROWS = 100;
const LIGHT_WAITING = '#e6e6e6';      // as in pictures (looks.py)

class Timeline {
  // plot: Bokeh's; data: {updates, looks, texts}, see timeline_figure.py.
  constructor(plot, view, data, isDark) {
    this.plot = plot;
    this.view = view;
    this.data = data;
    this.isDark = isDark;
    this.chosen = -1;
    this.waiting = null;
    plot.x_range.change.connect(() => this.redrawSoon());
    plot.on_event('tap', event => this.chooseAt(event.x, event.y));
    const element = document.getElementById('timeline');
    element.addEventListener('keydown', event => this.pressed(event));
    addEventListener('resize', () => this.redrawSoon());
    for (const button of document.querySelectorAll('[data-move]')) {
      button.addEventListener('click', () => this.move(button.dataset.move));
    }
    this.table = document.getElementById('timeline-table');
    this.table.addEventListener('toggle', () => this.fillTable());
  }

  async show(number) {
    this.update = this.data.updates[number];
    this.events = await unpackedEvents(this.update, this.data.looks.length);
    this.chosen = -1;
    this.nameRows();
    this.fillLegend();
    this.fillSummary();
    this.say('Click a box to see what it is and what was waited for.');
    const span = 1e3 * this.update.span;
    this.plot.x_range.setv({
      start: 0, end: span, reset_start: 0, reset_end: span,
      bounds: [0, span], min_interval: Math.min(span, 1e-3)});
    this.redraw();
  }

  nameRows() {
    const ranks = [...new Set(this.update.rows.map(row => row.rank))];
    const last = Math.max(...ranks);
    const height = Math.min(Math.max(MOST_HEIGHT / (last + 1),
                                     ROW_HEIGHTS[0]), ROW_HEIGHTS[1]);
    const axis = this.plot.left[0];
    axis.ticker.ticks = ranks;
    axis.major_label_overrides = new Map(
        ranks.map(rank => [rank, `rank ${rank}`]));
    const range = {start: last + 0.5, end: -0.5};
    this.plot.y_range.setv({...range, reset_start: range.start,
                            reset_end: range.end});
    this.plot.height = Math.round(height * (last + 1) + 90);
  }

  fillLegend() {
    const legend = document.getElementById('timeline-legend');
    legend.replaceChildren();
    const used = [...new Set(this.events.look)].sort((a, b) => a - b);
    for (const number of used) {
      const look = this.data.looks[number];
      const entry = document.createElement('li');
      const box = document.createElement('span');
      box.className = 'swatch' + (look.hatch ? ' hatched' : '');
      box.style.backgroundColor = this.colour(number);
      entry.append(box, look.label);
      legend.append(entry);
    }
  }

  // Milliseconds of each look, by rank and lane.
  timesByRank() {
    const {events, update} = this, sums = new Map();
    update.rows.forEach(({rank, lane}, number) => {
      const name = `rank ${rank}${lane ? `, ${lane}` : ''}`;
      if (!sums.has(name)) sums.set(name, new Float64Array(events.looks));
      const sum = sums.get(name);
      for (let event = events.first[number]; event < events.first[number + 1];
           event++) {
        sum[events.look[event]] += events.end[event] - events.start[event];
      }
    });
    return sums;
  }

  // The timeline in numbers for those who cannot see the figure; the table is
  // never folded away.
  fillSummary() {
    const used = [...new Set(this.events.look)].sort((a, b) => a - b);
    const table = document.createElement('table');
    table.createCaption().append(`Timeline of ${this.update.label} in `
        + 'numbers: time that each rank spends on what. Time inside of '
        + 'something else counts for both. Single events follow after the '
        + 'button '
        + `“${this.table.querySelector('summary').textContent}”.`);
    const cell = (row, text, scope) => {
      const made = document.createElement(scope ? 'th' : 'td');
      if (scope) made.scope = scope;
      made.append(text);
      row.append(made);
    };
    const header = table.createTHead().insertRow();
    for (const title of ['rank', ...used.map(
        look => this.data.looks[look].label)]) cell(header, title, 'col');
    const body = table.createTBody();
    for (const [name, sum] of this.timesByRank()) {
      const row = body.insertRow();
      cell(row, name, 'row');
      for (const look of used) cell(row, inWords(sum[look]));
    }
    document.getElementById('timeline-summary').replaceChildren(table);
  }

  colour(look) {
    const colour = this.data.looks[look].colour;
    // The pictures' light grey would be the brightest thing on a dark page.
    return this.isDark() && colour === LIGHT_WAITING ? '#45494f' : colour;
  }

  redrawSoon() {
    if (this.waiting !== null || !this.events) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = null;
      this.redraw();
    });
  }

  redraw() {
    const {start, end} = this.plot.x_range;
    const pixels = Math.max(100, this.view.frame.bbox.width);
    const seen = boxesInView(this.events, start, end, pixels);
    const place = name => seen.row.map(row => this.update.rows[row][name]);
    const looks = this.data.looks;
    const colours = looks.map((_, look) => this.colour(look));
    const sides = {left: seen.left, right: seen.right,
                   top: place('top'), bottom: place('bottom')};
    this.source('boxes').data = {
      ...sides, colour: seen.look.map(look => colours[look])};
    this.drawDetails(seen, sides, pixels / (end - start));
    this.drawChosen();
    if (this.table.open) this.fillTable();
  }

  // Edges, hatches and numbers, where there is room for them.
  drawDetails(seen, sides, scale) {
    const hatched = {left: [], right: [], top: [], bottom: [], hatch: []};
    const waits = {left: [], right: [], top: [], bottom: []};
    const copy = (target, box) => {
      for (const side of ['left', 'right', 'top', 'bottom']) {
        target[side].push(sides[side][box]);
      }
    };
    const numbers = {x: [], y: [], text: [], colour: []};
    seen.box.forEach((event, box) => {
      const width = (sides.right[box] - sides.left[box]) * scale;
      const look = this.data.looks[seen.look[box]];
      if (event < 0 || width < 6) return;
      if (look.colour === LIGHT_WAITING) copy(waits, box);
      if (look.hatch) {
        copy(hatched, box);
        hatched.hatch.push(look.hatch);
      }
      const row = this.update.rows[seen.row[box]];
      if (this.events.microBatch[event] >= 0 && width > 26 && !row.lane) {
        numbers.x.push((Math.max(sides.left[box], this.plot.x_range.start)
            + Math.min(sides.right[box], this.plot.x_range.end)) / 2);
        numbers.y.push((sides.top[box] + sides.bottom[box]) / 2);
        numbers.text.push(String(this.events.microBatch[event]));
        numbers.colour.push(textColour(this.colour(seen.look[box])));
      }
    });
    this.source('waits').data = waits;
    this.source('hatched').data = hatched;
    this.source('numbers').data = numbers;
  }

  drawChosen() {
    const event = this.chosen;
    const row = event < 0 ? [] : [this.update.rows[this.events.row[event]]];
    this.source('chosen').data = {
      left: row.map(() => this.events.start[event]),
      right: row.map(() => this.events.end[event]),
      top: row.map(({top}) => top), bottom: row.map(({bottom}) => bottom)};
  }

  source(name) {
    return this.plot.renderers.find(one => one.name === name).data_source;
  }

  move(how) {
    const range = this.plot.x_range, span = 1e3 * this.update.span;
    const width = range.end - range.start;
    const factor = {in: 0.5, out: 2}[how] ?? 1;
    const shift = {left: -0.25, right: 0.25}[how] ?? 0;
    const wide = how === 'all' ? span : Math.min(span, width * factor);
    const middle = (range.start + range.end) / 2 + shift * width;
    const from = Math.min(Math.max(0, middle - wide / 2), span - wide);
    range.setv({start: from, end: from + wide});
  }

  pressed(event) {
    const moves = {ArrowLeft: 'left', ArrowRight: 'right', '+': 'in',
                   '=': 'in', '-': 'out', Home: 'all'};
    const steps = {',': -1, '.': 1};
    const rows = {ArrowUp: -1, ArrowDown: 1};
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) this.move(moves[event.key]);
    else if (event.key in steps) this.chooseNext(steps[event.key]);
    else if (event.key in rows) this.chooseRow(rows[event.key]);
    else return;
    event.preventDefault();
  }

  // The event at a place, or within a few pixels; inner before outer ones.
  chooseAt(x, y) {
    const range = this.plot.x_range;
    const near = 4 * (range.end - range.start)
        / Math.max(100, this.view.frame.bbox.width);
    let best = -1, least = near;
    this.update.rows.forEach((row, number) => {
      if (y < row.top || y > row.bottom) return;
      for (let event = this.events.first[number];
           event < this.events.first[number + 1]; event++) {
        const away = Math.max(0, this.events.start[event] - x,
                              x - this.events.end[event]);
        if (away <= least) [best, least] = [event, away];
      }
    });
    if (best >= 0) this.choose(best);
  }

  chooseNext(step) {
    const row = this.chosen < 0 ? 0 : this.events.row[this.chosen];
    const event = this.chosen < 0 ? this.events.first[0]
        : this.chosen + step;
    if (event >= this.events.first[row] && event < this.events.first[row + 1]) {
      this.choose(event);
    }
  }

  chooseRow(step) {
    if (this.chosen < 0) return this.chooseNext(1);
    const row = this.events.row[this.chosen] + step;
    if (row < 0 || row >= this.update.rows.length) return;
    const time = this.events.start[this.chosen];
    let best = this.events.first[row];
    for (let event = best; event < this.events.first[row + 1]; event++) {
      if (this.events.start[event] <= time) best = event;
    }
    this.choose(best);
  }

  choose(event) {
    this.chosen = event;
    const range = this.plot.x_range;
    const {start, end} = this.events;
    if (end[event] < range.start || start[event] > range.end) {
      const width = range.end - range.start, span = 1e3 * this.update.span;
      const from = Math.min(Math.max(0, start[event] - width / 2),
                            span - width);
      range.setv({start: from, end: from + width});
    }
    this.say(this.about(event).join(' · '));
    this.redraw();
  }

  // In words: who, what, when, and what was waited for.
  about(event) {
    const {events, data} = this;
    const row = this.update.rows[events.row[event]];
    const text = events.text[event] < 0 ? '' : data.texts[events.text[event]];
    const label = data.looks[events.look[event]].label;
    const lasted = inWords(events.end[event] - events.start[event]);
    const who = `rank ${row.rank}${row.lane ? `, ${row.lane}` : ''}`;
    const isWait = label === 'waiting';
    return [
      isWait ? `${who} waited ${lasted}${text ? ` for ${text}` : ''}`
             : `${who}: ${label}, ${lasted}`,
      `from ${inWords(events.start[event])} to ${inWords(events.end[event])}`,
      events.microBatch[event] < 0 ? ''
          : `micro-batch ${events.microBatch[event]}`,
      events.chunk[event] < 0 ? '' : `chunk ${events.chunk[event]}`,
      events.bytes[event] ? `${Number((events.bytes[event] / 1e3).toPrecision(4))} kB`
                          : '',
      isWait ? '' : text].filter(part => part);
  }

  say(text) {
    document.getElementById('timeline-chosen').textContent = text;
  }

  fillTable() {
    if (!this.table.open || !this.events) return;
    const {start, end} = this.plot.x_range, {events} = this;
    const length = event => events.end[event] - events.start[event];
    const seen = Array.from(events.start.keys()).filter(
        event => events.end[event] > start && events.start[event] < end);
    const table = document.createElement('table');
    for (const event of seen.sort((a, b) => length(b) - length(a))
             .slice(0, TABLE_ROWS)) {
      const row = table.insertRow();
      for (const part of this.about(event)) row.insertCell().append(part);
    }
    const remark = document.createElement('p');
    remark.className = 'remark';
    remark.append(`${table.rows.length} of ${seen.length} events in view.`);
    this.table.querySelector('div').replaceChildren(table, remark);
  }
}

function inWords(ms) {
  if (ms >= 1e3) return `${Number((ms / 1e3).toPrecision(4))} s`;
  if (ms >= 1 || ms === 0) return `${Number(ms.toPrecision(4))} ms`;
  return `${Number((1e3 * ms).toPrecision(3))} µs`;
}

// Black or white, whichever is easier to read (luma of BT.601).
function textColour(colour) {
  const [red, green, blue] = [1, 3, 5].map(
      place => parseInt(colour.slice(place, place + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? 'black' : 'white';
}
