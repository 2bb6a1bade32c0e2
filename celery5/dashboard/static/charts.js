// Draw the history that a figure has in its attributes, in place of the table that it shows without scripts.
import uPlot from "./uplot.js";

const drawn = new WeakMap();
const HEIGHT = 160;
const STEPS = [60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 604800];

export function drawCharts(root) {
  for (const figure of root.querySelectorAll("figure.chart")) draw(figure);
}

function draw(figure) {
  const times = JSON.parse(figure.dataset.times || "[]");
  const series = JSON.parse(figure.dataset.series || "[]");
  if (times.length < 2) return;
  const data = [times, ...series.map(([, values]) => values)];
  const known = drawn.get(figure);
  if (known && known.names === series.map(([name]) => name).join()) {
    known.plot.setData(data);
    return;
  }
  known?.plot.destroy();
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--muted").trim();
  const grid = { stroke: style.getPropertyValue("--line").trim(), width: 1 };
  const colours = [1, 2, 3, 4, 5].map((n) => style.getPropertyValue(`--series-${n}`).trim());
  const unit = figure.dataset.unit || "";
  const options = {
    width: Math.max(figure.clientWidth, 240),
    height: HEIGHT,
    legend: { live: true },
    tzDate: (at) => uPlot.tzDate(new Date(at * 1000), "UTC"),
    scales: { y: { range: (_, low, high) => [Math.min(0, low), high > 0 ? high * 1.1 : 1] } },
    axes: [
      { stroke: ink, grid, incrs: STEPS, values: (_, ticks) => ticks.map((at) => formatTime(at, times)) },
      { stroke: ink, grid, size: 60, values: (_, ticks) => ticks.map(format) },
    ],
    hooks: { draw: [(plot) => drawMarks(plot, JSON.parse(figure.dataset.marks || "[]"), ink)] },
    series: [
      { label: "time", value: (_, at) => (at === null ? "-" : formatMoment(at)) },
      ...series.map(([name], index) => ({
        label: name,
        stroke: colours[index % colours.length],
        width: 2,
        spanGaps: true,
        value: (_, value) => (value === null ? "-" : `${format(value)} ${unit}`),
      })),
    ],
  };
  const place = document.createElement("div");
  place.className = "plot";
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", figure.dataset.label || "history");
  figure.querySelector("figcaption").after(place);
  const plot = new uPlot(options, data, place);
  drawn.set(figure, { plot, names: series.map(([name]) => name).join() });
  new ResizeObserver(() => plot.setSize({ width: figure.clientWidth, height: HEIGHT })).observe(figure);
}

// Draw when processes were started: what changes at such a line has often come with a new version.
function drawMarks(plot, marks, colour) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = colour;
  ctx.setLineDash([4, 4]);
  for (const at of marks) {
    const x = plot.valToPos(at, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

// Times are in UTC here, as everywhere on the pages, whatever the zone of whoever looks.
function formatTime(at, times) {
  const moment = new Date(at * 1000).toISOString();
  const isLong = times[times.length - 1] - times[0] > 2 * 86400;
  return isLong ? `${moment.slice(5, 10)} ${moment.slice(11, 16)}` : moment.slice(11, 16);
}

function formatMoment(at) {
  return `${new Date(at * 1000).toISOString().slice(0, 16).replace("T", " ")} UTC`;
}

function format(value) {
  if (value === null) return "-";
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)} M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)} k`;
  return String(+value.toPrecision(3));
}
