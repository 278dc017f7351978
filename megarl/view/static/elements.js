"use strict";
// Shared by all views: creation of elements, colors, axes, and number formats.

// Creates an element. props: properties, `class`, and listeners such as `onclick`. Children may be text, or null.
function el(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const createHint = (text) => el("p", { class: "muted" }, text);

const COLORS = [
  ...["#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#14b8a6", "#ec4899", "#84cc16"],
  ...["#64748b", "#d97706", "#06b6d4", "#a16207", "#be185d", "#4d7c0f", "#7dd3fc", "#c4b5fd"],
];
const getColor = (index) => COLORS[index % COLORS.length];
const getThemeColor = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Distances of ticks on the step axis: whole numbers.
const STEP_INCREMENTS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6];

function createLegendItem(color, text, title = "") {
  const swatch = el("i");
  swatch.style.background = color;
  return el("span", { title }, swatch, text);
}

// Returns uPlot options of the two axes. yAxis: options of the y axis; xAxis: of the other, which has steps by default.
function createAxes(yAxis, xAxis = { incrs: STEP_INCREMENTS }) {
  const grid = getThemeColor("--grid");
  const style = {
    stroke: getThemeColor("--muted"),
    grid: { stroke: grid, width: 1 },
    ticks: { stroke: grid },
    font: "11px system-ui",
  };
  return [
    { ...style, ...xAxis },
    { ...style, ...yAxis },
  ];
}

function formatNumber(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return Number.isInteger(value) ? String(value) : String(+value.toPrecision(digits));
}

// Formats differences of log-probs, which are 1e-6 in a healthy run.
function formatSmall(value) {
  if (value === null) return "–";
  return value ? value.toExponential(1) : "0";
}

const formatCount = (count) => count.toLocaleString("en");

// Offers a blob as a file to save.
function download(name, blob) {
  const url = URL.createObjectURL(blob);
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
