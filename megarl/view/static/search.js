"use strict";
// Search in the text of answers: by the server of a live page, else in the files beside the page, a page at a time.
{
  const PAGE_HITS = 100;
  const PAGE_MS = 2000;
  const CHARS_BEFORE = 60;
  const CHARS_AFTER = 120;

  const encode = (text) =>
    Array.from(new TextEncoder().encode(text), (byte) => byte.toString(16).padStart(2, "0")).join("");

  // Returns the first match in the messages that follow the prompt, and the number of matches; null without any.
  function findMatch({ messages, num_prompt_messages: numPrompt }, pattern) {
    let first = null;
    let count = 0;
    for (const { role, text } of messages.slice(numPrompt)) {
      for (const match of text.matchAll(pattern)) {
        count++;
        if (count > 1) continue;
        const begin = match.index;
        const end = begin + match[0].length;
        first = {
          role,
          before: (begin > CHARS_BEFORE ? "…" : "") + text.slice(Math.max(0, begin - CHARS_BEFORE), begin),
          match: match[0],
          after: text.slice(end, end + CHARS_AFTER) + (end + CHARS_AFTER < text.length ? "…" : ""),
        };
      }
    }
    return first && { ...first, count };
  }

  // Returns the numbers of the rows that satisfy a predicate, by step.
  function groupByStep({ size, columns: { step, number } }, predicate) {
    const numbers = new Map();
    for (let row = 0; row < size; row++) {
      if (predicate && !predicate(row)) continue;
      if (!numbers.has(step[row])) numbers.set(step[row], new Set());
      numbers.get(step[row]).add(number[row]);
    }
    return numbers;
  }

  // Searches whole steps of the files beside the page. after: the last step that has been searched.
  async function searchFiles({ prefix, runIndex, table, predicate, text, after }) {
    const end = performance.now() + PAGE_MS;
    const pattern = new RegExp(text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "giu");
    const files = await megarl.loadBlock(`${prefix}files-${runIndex}`);
    const wanted = groupByStep(table, predicate);
    const steps = Object.keys(files).map(Number).filter((step) => wanted.has(step));
    const rest = steps.sort((a, b) => b - a).filter((step) => after === null || step < after);
    const page = { hits: [], searched: 0, next: null };
    for (const [i, step] of rest.entries()) {
      const stepHits = [];
      for (const [fileIndex, numbers] of files[step].entries()) {
        if (!numbers.some((number) => wanted.get(step).has(number))) continue;
        // These files are not kept, since all together may not fit into memory.
        for (const rollout of await megarl.requestBlock(`${prefix}tokens-${runIndex}-${step}-${fileIndex}`)) {
          if (!wanted.get(step).has(rollout.number)) continue;
          page.searched++;
          const match = findMatch(rollout, pattern);
          if (match) stepHits.push({ step, number: rollout.number, ...match });
        }
      }
      page.hits.push(...stepHits.sort((a, b) => a.number - b.number));
      const isFull = page.hits.length >= PAGE_HITS || performance.now() > end;
      if (isFull && i + 1 < rest.length) return { ...page, next: step };
    }
    return page;
  }

  async function searchServer({ prefix, runIndex, condition, text, after }) {
    const cursor = after === null ? "" : "-" + after.join("-");
    const page = await megarl.requestBlock(
      `${prefix}search-${runIndex}-t${encode(text)}-c${encode(condition)}${cursor}`,
    );
    if (page.error) throw new Error(page.error);
    return page;
  }

  // Returns a page of hits as {hits: [{step, number, count, role, before, match, after}], searched, next}.
  // request: {prefix, runIndex, table, predicate, condition, text, after}, where after is `next` of the page before, or
  // null, and the predicate is that of the condition.
  megarl.searchRollouts = (request) => (megarl.overview.is_live ? searchServer(request) : searchFiles(request));

  // Returns a snippet of a hit, as an element with the match marked.
  megarl.createSnippet = ({ role, before, match, after, count }) => {
    const more = count > 1 ? el("span", { class: "muted" }, ` (${count} matches)`) : null;
    return el("span", { class: "snippet" }, el("span", { class: "muted" }, role + ": "), before, el("mark", {}, match), after, more);
  };
}
