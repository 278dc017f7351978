"use strict";
// Loads named data blocks: inline, from a file beside the page, or from its server. All text is shown by textContent or
// as text nodes; nothing here ever creates HTML from a string.
const megarl = { known: new Map(), waiting: new Map(), views: {}, count: 0 };

megarl.inline = (name) => {
  const element = document.getElementById("block-" + name);
  return element ? JSON.parse(element.textContent) : undefined;
};

// Called by data files.
megarl.take = (name, value) => {
  const pending = megarl.waiting.get(name);
  megarl.waiting.delete(name);
  if (pending) pending.done(value);
};

megarl.fetch = (name) => {
  if (!megarl.waiting.has(name)) {
    const pending = {};
    pending.promise = new Promise((done, failed) => Object.assign(pending, { done, failed }));
    megarl.waiting.set(name, pending);
    const script = document.createElement("script");
    script.src = megarl.page.folder + name + ".js" + (megarl.overview.live ? "?" + ++megarl.count : "");
    script.onload = () => script.remove();
    script.onerror = () => {
      script.remove();
      megarl.waiting.delete(name);
      pending.failed(new Error(megarl.overview.live ? "the server does not respond; does tools/view.py still run?"
        : `the file ${script.getAttribute("src")} is not beside this page; keep the two together`));
    };
    document.head.append(script);
  }
  return megarl.waiting.get(name).promise;
};

megarl.need = (name) => {
  if (!megarl.known.has(name)) {
    const inline = megarl.inline(name);
    const promise = inline === undefined ? megarl.fetch(name) : Promise.resolve(inline);
    promise.catch(() => megarl.known.delete(name));
    megarl.known.set(name, promise);
  }
  return megarl.known.get(name);
};

const KINDS = { u8: Uint8Array, u16: Uint16Array, i32: Int32Array, f32: Float32Array };

// Decodes a packed column to numbers; null becomes NaN.
megarl.column = async (packed) => {
  const bytes = Uint8Array.from(atob(packed.data), (item) => item.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const values = new KINDS[packed.kind](await new Response(stream).arrayBuffer());
  if (!packed.among) return values;
  const among = packed.among.map((item) => (item === null ? NaN : item));
  const result = new Float64Array(values.length);
  for (let i = 0; i < values.length; i++) result[i] = among[values[i]];
  return result;
};

// Returns the rollout index of a run: {size, texts, columns: {name: numbers}}.
megarl.table = async (run) => {
  const name = "index-" + run;
  const content = await megarl.need(name);
  if (!content.open) {
    const names = Object.keys(content.columns);
    content.open = Promise.all(names.map((column) => megarl.column(content.columns[column]))).then((columns) => ({
      size: content.size,
      texts: content.texts,
      columns: Object.fromEntries(names.map((column, i) => [column, columns[i]])),
    }));
  }
  return content.open;
};

// Returns one rollout with its tokens.
megarl.rollout = async (run, step, number) => {
  let rollouts;
  if (megarl.overview.live) {
    rollouts = await megarl.need(`tokens-${run}-${step}-${number}`);
    if (rollouts.error) throw new Error(rollouts.error);
  } else {
    const files = (await megarl.need("places-" + run))[step] || [];
    const index = files.findIndex((numbers) => numbers.includes(number));
    if (index < 0) throw new Error("The tokens of this rollout are not beside this page. " +
      "Write it with a higher --details, or look with tools/view.py --serve.");
    rollouts = await megarl.need(`tokens-${run}-${step}-${index}`);
  }
  return rollouts.find((rollout) => rollout.number === number);
};

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

const shade = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// Tick increments of the step axis.
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 1000000];
const COLOURS = ["#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#14b8a6", "#ec4899", "#84cc16", "#64748b", "#d97706",
  "#06b6d4", "#a16207", "#be185d", "#4d7c0f", "#7dd3fc", "#c4b5fd"];
const said = (value, digits = 4) => (value === null || value === undefined || Number.isNaN(value) ? "–"
  : Number.isInteger(value) ? String(value) : String(+value.toPrecision(digits)));
