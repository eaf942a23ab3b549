// Draws the page's figures, and does what its lists and buttons say.
'use strict';

const DARK = matchMedia('(prefers-color-scheme: dark)');
const AXES = {iteration: 'updates', epoch: 'epochs',
              seconds: 'seconds of training'};
const plots = new Map();      // by name of the figure
let timeline = null;

function colourPlot(plot) {
  const text = DARK.matches ? '#e0e0e0' : '#1c1c1c';
  const line = DARK.matches ? '#3a3e44' : '#d8d8d8';
  for (const axis of [...plot.left, ...plot.below]) {
    axis.setv({axis_label_text_color: text, major_label_text_color: text,
               axis_line_color: line, minor_tick_line_color: null,
               axis_label_text_font_style: 'normal'});
    if (axis.major_tick_line_color !== null) axis.major_tick_line_color = line;
  }
  for (const grid of plot.center) {
    if ('grid_line_color' in grid) grid.grid_line_color = line;
  }
}

function chooseAxis(name) {
  for (const [figure, plot] of plots) {
    if (!figure.startsWith('curve-')) continue;
    for (const renderer of plot.renderers) {
      if (renderer.glyph) renderer.glyph.x = {field: name};
    }
    plot.below[0].axis_label = AXES[name];
    for (const span of plot.center) {
      if (span.name === 'start') span.location = span.tags[0][name];
    }
  }
}

// Thick and blue is the chosen line; the others are thin and grey.
function chooseLine(figure, name) {
  const family = figure.replace(/-\d+$/, '');
  for (const [other, plot] of plots) {
    if (other.replace(/-\d+$/, '') !== family) continue;
    const source = plot.renderers.find(one => one.name === 'lines')
        .data_source;
    const data = source.data;
    plot.colours ??= [data.colour, data.alpha];
    const titles = Array.from(data.title, title => title.replace(/^\u200b/, ''));
    const pick = (chosen, rest) => titles.map(
        (title, line) => !name ? rest(line) : title === name ? chosen : null);
    const fill = (values, weak) => values.map(value => value ?? weak);
    source.data = {
      ...data,
      colour: fill(pick('#0072b2', line => plot.colours[0][line]), '#8c8c8c'),
      alpha: fill(pick(1, line => plot.colours[1][line]), 0.25),
      width: fill(pick(3.5, () => 2), 1.5)};
  }
}

function toggleLine(button) {
  const shown = button.getAttribute('aria-pressed') !== 'true';
  button.setAttribute('aria-pressed', String(shown));
  for (const renderer of plots.get(button.dataset.figure).renderers) {
    if (renderer.name === button.dataset.line) renderer.visible = shown;
  }
}

function chosen(select) {
  if (select.dataset.kind === 'axis') chooseAxis(select.value);
  if (select.dataset.kind === 'line') {
    chooseLine(select.dataset.figure, select.value);
  }
  if (select.dataset.kind === 'update') timeline?.show(Number(select.value));
}

async function drawPage() {
  const data = JSON.parse(document.getElementById('data').textContent);
  for (const {name, kind, item} of data.figures) {
    await Bokeh.embed.embed_item(item);
    const view = Bokeh.index.get_by_id(item.root_id);
    plots.set(name, view.model);
    colourPlot(view.model);
    if (kind === 'timeline') {
      timeline = new Timeline(view.model, view, data.timeline,
                              () => DARK.matches);
      await timeline.show(0);
      await new Promise(requestAnimationFrame);
      performance.mark('timeline drawn');
    }
    // The browser shows each figure before the next one is made.
    await new Promise(requestAnimationFrame);
  }
  DARK.addEventListener('change', () => {
    for (const plot of plots.values()) colourPlot(plot);
    timeline?.fillLegend();
    timeline?.redraw();
  });
  for (const select of document.querySelectorAll('select')) {
    select.addEventListener('change', () => chosen(select));
    if (select.selectedIndex > 0) chosen(select);   // kept by the browser
  }
  for (const button of document.querySelectorAll('button.line')) {
    button.addEventListener('click', () => toggleLine(button));
  }
  document.documentElement.dataset.drawn = 'yes';
  performance.mark('drawn');
}

drawPage();
