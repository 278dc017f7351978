"use strict";
// Loads named data blocks: inline, from a file beside the page, or from its server. All text is shown by textContent or
// as text nodes; nothing here ever creates HTML from a string.
const megarl = {
  page: null, // the `page` block
  overview: null, // the `overview` block, replaced when a live run changes
  runIndex: 0, // the selected run, an index into overview.runs
  views: {},
  blocks: new Map(), // promises of blocks by name
  requests: new Map(), // requests in flight by block name
  numRequests: 0,
};

megarl.parseInlineBlock = (name) => {
  const element = document.getElementById("block-" + name);
  return element ? JSON.parse(element.textContent) : undefined;
};

// Called by the scripts that contain blocks.
megarl.receiveBlock = (name, value) => {
  const request = megarl.requests.get(name);
  megarl.requests.delete(name);
  if (request) request.resolve(value);
};

// Requests a block by a script element, because browsers do not let pages on disk fetch files.
megarl.requestBlock = (name) => {
  if (!megarl.requests.has(name)) {
    const request = {};
    request.promise = new Promise((resolve, reject) => Object.assign(request, { resolve, reject }));
    megarl.requests.set(name, request);
    const script = document.createElement("script");
    const cacheBuster = megarl.overview.is_live ? `?${++megarl.numRequests}` : "";
    script.src = `${megarl.page.folder}${name}.js${cacheBuster}`;
    script.onload = () => script.remove();
    script.onerror = () => {
      script.remove();
      megarl.requests.delete(name);
      const message = megarl.overview.is_live
        ? "the server does not respond; is megarl view still running?"
        : `the file ${script.getAttribute("src")} is not beside this page; keep the two together`;
      request.reject(new Error(message));
    };
    document.head.append(script);
  }
  return megarl.requests.get(name).promise;
};

// Returns a promise of a block, which is kept unless it fails.
megarl.loadBlock = (name) => {
  if (!megarl.blocks.has(name)) {
    const inline = megarl.parseInlineBlock(name);
    const promise = inline === undefined ? megarl.requestBlock(name) : Promise.resolve(inline);
    promise.catch(() => megarl.blocks.delete(name));
    megarl.blocks.set(name, promise);
  }
  return megarl.blocks.get(name);
};

// Drops the tables of rollouts, so that they are loaded again.
megarl.dropTables = () => {
  for (const name of [...megarl.blocks.keys()]) {
    if (/^(eval-)?index-|^prompts-/.test(name)) megarl.blocks.delete(name);
  }
};

{
  const ARRAY_TYPES = { u8: Uint8Array, u16: Uint16Array, i32: Int32Array, f32: Float32Array };

  // Decodes a column that column_codec.py has packed; null becomes NaN.
  megarl.unpackColumn = async (packed) => {
    const bytes = Uint8Array.from(atob(packed.data), (char) => char.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const values = new ARRAY_TYPES[packed.dtype](await new Response(stream).arrayBuffer());
    if (!packed.dictionary) return values;
    const dictionary = packed.dictionary.map((value) => (value === null ? NaN : value));
    const result = new Float64Array(values.length);
    for (let i = 0; i < values.length; i++) result[i] = dictionary[values[i]];
    return result;
  };

  async function unpackTable({ size, texts, columns }) {
    const names = Object.keys(columns);
    const unpacked = await Promise.all(names.map((name) => megarl.unpackColumn(columns[name])));
    return { size, texts, columns: Object.fromEntries(names.map((name, i) => [name, unpacked[i]])) };
  }

  // Returns the rollouts of a run as {size, texts, columns: {name: numbers}}. A text column has indices into its texts.
  // prefix: "eval-" for those of evaluations, "" for those of training, here and below.
  megarl.loadTable = async (runIndex, prefix = "") => {
    const block = await megarl.loadBlock(`${prefix}index-${runIndex}`);
    block.table ??= unpackTable(block);
    return block.table;
  };
}

// Returns one rollout with its tokens.
megarl.loadRollout = async (runIndex, step, number, prefix = "") => {
  let rollouts;
  if (megarl.overview.is_live) {
    rollouts = await megarl.loadBlock(`${prefix}tokens-${runIndex}-${step}-${number}`);
    if (rollouts.error) throw new Error(rollouts.error);
  } else {
    const files = (await megarl.loadBlock(`${prefix}files-${runIndex}`))[step] || [];
    const fileIndex = files.findIndex((numbers) => numbers.includes(number));
    if (fileIndex < 0) {
      throw new Error(
        "This page has no tokens of this rollout. Write it with a higher --details, or use megarl view --follow.",
      );
    }
    rollouts = await megarl.loadBlock(`${prefix}tokens-${runIndex}-${step}-${fileIndex}`);
  }
  return rollouts.find((rollout) => rollout.number === number);
};
