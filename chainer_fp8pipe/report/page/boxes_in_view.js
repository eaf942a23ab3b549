// The level of detail of a timeline: which boxes to draw for a part of time.
'use strict';

const MOST_BOXES = 6000;      // beyond, cells grow: drawing takes longest

// Gives the boxes between two times, for a picture of so many pixels.
//
// A box that is longer than a cell (a pixel, or more where there would be too
// many boxes) stays as it is.  Of the shorter ones, each cell of a row shows the
// look that takes most of its time, and neighbours that look the same become
// one box.  So at most two boxes per row and cell are drawn, however many
// there are.
//
// boxes: {start, end, look}: arrays of one entry per box, by row and start;
// first: where each row begins there, and the end; looks: how many there are.
// Returns arrays {left, right, row, look, box}; box is -1 for merged ones.
function boxesInView(boxes, from, to, pixels) {
  let seen, cells = Math.max(1, Math.round(pixels));
  do {
    seen = boxesOfCells(boxes, from, to, cells);
    cells = Math.floor(cells / 2);
  } while (seen.box.length > MOST_BOXES && cells >= 100);
  return seen;
}

function boxesOfCells(boxes, from, to, cells) {
  const rows = boxes.first.length - 1;
  const cell = (to - from) / cells;
  const seen = {left: [], right: [], row: [], look: [], box: []};
  const add = (row, left, right, look, box) => {
    seen.row.push(row);
    seen.left.push(left);
    seen.right.push(right);
    seen.look.push(look);
    seen.box.push(box);
  };
  const times = new Float64Array(boxes.looks);
  for (let row = 0; row < rows; row++) {
    let at = -1;                  // the cell that is being filled
    let open = null;              // merged cells, not yet added
    times.fill(0);
    const close = () => {
      if (at < 0) return;
      let look = 0;
      for (let other = 1; other < boxes.looks; other++) {
        if (times[other] > times[look]) look = other;
      }
      const left = from + at * cell;
      if (open && open.look === look && open.next === at) {
        open.next = at + 1;
      } else {
        if (open) add(row, open.left, from + open.next * cell, open.look, -1);
        open = {left, look, next: at + 1};
      }
      times.fill(0);
    };
    const end = boxes.first[row + 1];
    for (let box = firstFrom(boxes, row, from);
         box < end && boxes.start[box] <= to; box++) {
      if (boxes.end[box] < from) continue;
      const length = boxes.end[box] - boxes.start[box];
      if (length >= cell) {
        add(row, boxes.start[box], boxes.end[box], boxes.look[box], box);
        continue;
      }
      const here = Math.max(0, Math.floor((boxes.start[box] - from) / cell));
      if (here !== at) {
        close();
        at = here;
      }
      // Something that took no time is seen as well.
      times[boxes.look[box]] += Math.max(length, cell * 1e-6);
    }
    close();
    if (open) add(row, open.left, from + open.next * cell, open.look, -1);
  }
  return seen;
}

// The first box of a row that may end after a time.
function firstFrom(boxes, row, time) {
  boxes.reach ??= reached(boxes);
  let low = boxes.first[row], high = boxes.first[row + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (boxes.reach[middle] < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

// For each box the latest end in its row so far.
function reached(boxes) {
  const reach = Float64Array.from(boxes.end);
  for (let row = 0; row < boxes.first.length - 1; row++) {
    for (let box = boxes.first[row] + 1; box < boxes.first[row + 1]; box++) {
      reach[box] = Math.max(reach[box], reach[box - 1]);
    }
  }
  return reach;
}
