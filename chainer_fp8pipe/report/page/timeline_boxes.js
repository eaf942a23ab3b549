// The boxes of a timeline, on a canvas of their own behind Bokeh's.
'use strict';

// Bokeh prepares, indexes and fills each box by itself, which takes ten times
// as long as the picture has; here a box is one rectangle.
const EDGE = '#8c8c8c';       // of waits, which may be as light as the ground
const HATCH_SIZE = 8;         // pixels

class BoxCanvas {
  // parent: the element that has the figure.
  constructor(parent) {
    this.canvas = document.createElement('canvas');
    this.canvas.setAttribute('aria-hidden', 'true');
    parent.prepend(this.canvas);
    this.context = this.canvas.getContext('2d', {alpha: true});
    this.hatches = new Map();
  }

  // Clears it, and puts it where the frame of the figure is, in pixels.
  clear({left, top, width, height}) {
    const {canvas, context} = this, fine = devicePixelRatio || 1;
    const sizes = [Math.round(width * fine), Math.round(height * fine)];
    if (canvas.width !== sizes[0] || canvas.height !== sizes[1]) {
      [canvas.width, canvas.height] = sizes;
    }
    const place = `left:${left}px;top:${top}px;width:${width}px;`
        + `height:${height}px`;
    if (this.place !== place) canvas.style.cssText = this.place = place;
    context.setTransform(fine, 0, 0, fine, 0, 0);
    context.clearRect(0, 0, width, height);
    Object.assign(context, {strokeStyle: EDGE, lineWidth: 1, font: '11px '
        + 'system-ui, "DejaVu Sans", sans-serif', textAlign: 'center',
        textBaseline: 'middle'});
    this.width = width;
  }

  // boxes: as boxesInView gives them, all sides in pixels; looks: {colour,
  // hatch, isWait} by number; number: what is written into a box, or ''.
  // Edges, hatches and numbers are for boxes that have room for them.
  draw(boxes, looks, number) {
    const {context} = this, {left, right, top, bottom, look, box} = boxes;
    let last = -1;
    for (let at = 0; at < left.length; at++) {
      if (look[at] !== last) {
        last = look[at];
        context.fillStyle = looks[last].colour;
      }
      context.fillRect(left[at], top[at], right[at] - left[at],
                       bottom[at] - top[at]);
      if (box[at] < 0 || right[at] - left[at] < 6) continue;
      // Far outside, sides would be too large for the picture's library.
      const from = Math.max(left[at], -10);
      const to = Math.min(right[at], this.width + 10);
      const sides = [from, top[at], to - from, bottom[at] - top[at]];
      const {colour, hatch, isWait} = looks[last];
      if (isWait) context.strokeRect(...sides);
      const text = to - from > 26 ? number(box[at]) : '';
      if (!hatch && !text) continue;
      if (hatch) {
        context.fillStyle = this.hatch(hatch);
        context.fillRect(...sides);
      }
      if (text) {
        context.fillStyle = textColour(colour);
        context.fillText(text, (Math.max(from, 0) + Math.min(to, this.width))
            / 2, (top[at] + bottom[at]) / 2);
      }
      last = -1;
    }
  }

  // White lines from corner to corner, of Bokeh's names.
  hatch(name) {
    if (!this.hatches.has(name)) {
      const tile = document.createElement('canvas');
      tile.width = tile.height = HATCH_SIZE;
      const context = tile.getContext('2d');
      context.strokeStyle = 'white';
      context.beginPath();
      for (const shift of [-HATCH_SIZE, 0, HATCH_SIZE]) {
        const ends = [shift - 1, shift + HATCH_SIZE + 1];
        if (name === 'right_diagonal_line') ends.reverse();
        context.moveTo(ends[0], -1);
        context.lineTo(ends[1], HATCH_SIZE + 1);
      }
      context.stroke();
      this.hatches.set(name, this.context.createPattern(tile, 'repeat'));
    }
    return this.hatches.get(name);
  }
}

// Black or white, whichever is easier to read (luma of BT.601).
function textColour(colour) {
  const [red, green, blue] = [1, 3, 5].map(
      place => parseInt(colour.slice(place, place + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? 'black' : 'white';
}
