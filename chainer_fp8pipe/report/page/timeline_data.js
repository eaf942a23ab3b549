// The events of an update, as packed_events.py has packed them.
'use strict';

// Gives arrays with an entry per event, times in ms; see PackedEvents.add.
async function unpackedEvents(update, looks) {
  const packed = Uint8Array.from(atob(update.columns),
                                 letter => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(
      new DecompressionStream('deflate'));
  const buffer = await new Response(stream).arrayBuffer();
  const count = update.count;
  let place = 0;
  const column = kind => {
    const array = new kind(buffer, place, count);
    place += array.byteLength;
    return array;
  };
  const bytes = column(Float64Array);
  const begun = column(Uint32Array), length = column(Uint32Array);
  const text = column(Int32Array), microBatch = column(Int32Array);
  const chunk = column(Int32Array);
  const row = column(Uint16Array), look = column(Uint16Array);
  const unit = 1e3 * update.unit;
  const start = Float64Array.from(begun, time => time * unit);
  const end = start.map((time, event) => time + length[event] * unit);
  const first = new Uint32Array(update.rows.length + 1);
  for (const number of row) first[number + 1]++;
  for (let number = 0; number < update.rows.length; number++) {
    first[number + 1] += first[number];
  }
  return {bytes, start, end, text, microBatch, chunk, row, look, first,
          looks};
}
