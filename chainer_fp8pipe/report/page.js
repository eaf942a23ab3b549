// Embeds the page's figures, and does what its lists and buttons say.
'use strict';

const DARK = matchMedia('(prefers-color-scheme: dark)');
const AXES = {iteration: 'updates', epoch: 'epochs',
              seconds: 'seconds of training'};
const plots = new Map();      // by name of the figure
const choices = new Map();

function colourPlot(plot) {
  const text = DARK.matches ? '#e0e0e0' : '#1c1c1c';
  const line = DARK.matches ? '#3a3e44' : '#d8d8d8';
  for (const axis of [...plot.left, ...plot.below]) {
    axis.setv({axis_label_text_color: text, major_label_text_color: text,
               axis_line_color: line, major_tick_line_color: line,
               minor_tick_line_color: null,
               axis_label_text_font_style: 'normal'});
  }
  for (const grid of plot.center) {
    if ('grid_line_color' in grid) grid.grid_line_color = line;
  }
}

// Shows another of a figure's choices, such as another update.
function choose(name, number) {
  const plot = plots.get(name), {columns, span} = choices.get(name)[number];
  plot.renderers[0].data_source.data = columns;
  plot.x_range.setv({start: 0, end: span, bounds: [0, span],
                     reset_start: 0, reset_end: span});
  for (const one of document.querySelectorAll(`[data-of="${name}"]`)) {
    one.hidden = one.dataset.number !== String(number);
  }
}

function chooseAxis(column) {
  for (const plot of plots.values()) {
    for (const renderer of plot.renderers) {
      if (renderer.data_source?.data.iteration === undefined) continue;
      renderer.glyph.x = {field: column};
      plot.below[0].axis_label = AXES[column];
    }
    for (const span of plot.center) {
      if (span.name === 'start') span.location = span.tags[0][column];
    }
  }
}

function toggleLine(button) {
  const shown = button.getAttribute('aria-pressed') !== 'true';
  button.setAttribute('aria-pressed', String(shown));
  for (const renderer of plots.get(button.dataset.figure).renderers) {
    if (renderer.name === button.dataset.line) renderer.visible = shown;
  }
}

async function drawPage() {
  const data = JSON.parse(document.getElementById('data').textContent);
  for (const {name, item, shown} of data.figures) {
    const views = await Bokeh.embed.embed_item(item, name);
    plots.set(name, views.roots[0].model);
    colourPlot(plots.get(name));
    choices.set(name, shown);
    if (shown.length) choose(name, 0);
    // The browser shows each figure before the next one is made.
    await new Promise(requestAnimationFrame);
  }
  DARK.addEventListener('change', () => {
    for (const plot of plots.values()) colourPlot(plot);
  });
  for (const list of document.querySelectorAll('select')) {
    list.selectedIndex = 0;     // browsers keep what was chosen before
    list.addEventListener('change', () => list.dataset.figure
        ? choose(list.dataset.figure, Number(list.value))
        : chooseAxis(list.value));
  }
  for (const button of document.querySelectorAll('button.line')) {
    button.addEventListener('click', () => toggleLine(button));
  }
  document.documentElement.dataset.drawn = 'yes';
}

drawPage();
