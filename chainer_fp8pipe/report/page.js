// Embeds the page's figures, and does what its lists and buttons say.
'use strict';

const DARK = matchMedia('(prefers-color-scheme: dark)');
const AXES = {iteration: 'updates', epoch: 'epochs',
              seconds: 'seconds of training'};
const plots = new Map();        // by name of the figure
const choices = new Map();

function colourPlot(plot) {
  const [text, line] = DARK.matches ? ['#e0e0e0', '#3a3e44']
                                    : ['#1c1c1c', '#d8d8d8'];
  for (const axis of [...plot.left, ...plot.below]) {
    axis.setv({axis_label_text_color: text, major_label_text_color: text,
               axis_line_color: line, major_tick_line_color: line});
  }
  for (const grid of plot.center) {
    if ('grid_line_color' in grid) grid.grid_line_color = line;
  }
}

// Shows another of a figure's choices, such as another update.
function choose(name, number) {
  const plot = plots.get(name), columns = choices.get(name)[number];
  const end = columns.right.reduce((a, b) => Math.max(a, b), 0);
  plot.renderers[0].data_source.data = columns;
  // Within the bounds of the update before, the range could not grow.
  plot.x_range.bounds = [0, end];
  plot.x_range.setv({start: 0, end, reset_start: 0, reset_end: end});
  for (const one of document.querySelectorAll(`[data-of="${name}"]`)) {
    one.hidden = one.dataset.number !== String(number);
  }
}

function chooseAxis(column) {
  for (const plot of plots.values()) {
    for (const {data_source: source, glyph} of plot.renderers) {
      if (!source.data.epoch) continue;
      glyph['xs' in glyph ? 'xs' : 'x'] = {field: column};
      plot.below[0].axis_label = AXES[column];
      for (const span of plot.center) {
        if (span.name === 'start') span.location = span.tags[0][column];
      }
    }
  }
}

function toggleLine(button) {
  const {figure, line} = button.dataset;
  const shown = button.getAttribute('aria-pressed') !== 'true';
  button.setAttribute('aria-pressed', String(shown));
  for (const {data_source: source, view} of plots.get(figure).renderers) {
    view.filter.booleans = view.filter.booleans.map((before, place) =>
        source.data.label[place] === line ? shown : before);
  }
  for (const span of plots.get(figure).center) {
    if (span.name === 'start' && line === 'started again') span.visible = shown;
  }
}

async function drawPage() {
  const data = JSON.parse(document.getElementById('data').textContent);
  for (const {name, item, shown} of data) {
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
