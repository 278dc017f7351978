"use strict";
// One rollout: values, turns, and tokens colored by the selected mode.
{
  const MOST = 20000; // tokens drawn at once
  const each = (f) => (one) => one.ids.map((_, i) => f(one, i));
  const small = (value) => (value === null ? "–" : value ? value.toExponential(1) : "0");
  const less = (a, b) => (a === null || b === null || a === undefined || b === undefined ? null : a - b);
  const MODES = {
    mask: { label: "mask", about: "what the policy wrote, and is trained on", of: (one) => one.mask.map((own) => (own ? 1 : null)) },
    advantage: { label: "advantage", about: "red below 0, green above", of: (one) => one.advantages, ends: true },
    logprob: { label: "log-prob, engine", about: "the stronger the colour, the less likely", of: (one) => one.logprobs },
    trainer: { label: "log-prob, trainer", about: "the stronger the colour, the less likely", of: (one) => one.trainer },
    ratio: { label: "ratio", about: "trainer over engine, in logarithms: red below 1, green above", of: (one) => one.trainer && each((own, i) => less(own.trainer[i], own.logprobs[i]))(one), ends: true },
    version: { label: "weight version", about: "a colour for each version", of: (one) => (one.versions.some((own) => own >= 0) ? one.versions : null) },
    cache: { label: "cache", about: "green: the engine had it in its cache when it was first asked to go on behind it; orange: it computed it anew", of: (one) => (one.cached.some((own) => own !== null) ? one.cached : null) },
    routing: { label: "routing", about: "how far the trainer's log-prob moves when it chooses the experts itself", of: (one) => one.trainer && one.unreplayed && each((own, i) => { const by = less(own.trainer[i], own.unreplayed[i]); return by === null ? null : Math.abs(by); })(one) },
  };
  let mode = "mask";

  function prepare(one) {
    if (one.mask) return one;
    one.mask = [];
    one.versions = [];
    one.cached = [];
    let since = 0, until = 0; // tokens after the last request; the next request tells which of them were cached
    for (const turn of one.turns) {
      const known = turn.written && turn.cached !== null && turn.cached !== undefined;
      if (turn.written) { for (; since < until; since++) one.cached.push(known ? (since < turn.cached ? 1 : 0) : null); }
      until += turn.tokens;
      const runs = turn.runs.length ? turn.runs : [[turn.version, turn.tokens]];
      for (const [version, tokens] of runs) for (let i = 0; i < tokens; i++) { one.mask.push(turn.written); one.versions.push(turn.written ? version ?? -1 : -1); }
    }
    for (; since < until; since++) one.cached.push(null);
    return one;
  }

  // Returns the end of the color scale: in two-sided modes and routing the rollout's largest value, however small.
  function scale(one) {
    if (["mask", "version", "cache"].includes(mode)) return null;
    const most = MODES[mode].of(one).reduce((a, value, i) => (one.mask[i] && value !== null ? Math.max(a, Math.abs(value)) : a), 0);
    return MODES[mode].ends || mode === "routing" ? most : Math.max(3, Math.min(most, 8));
  }

  function explained(one) {
    if (!MODES[mode].of(one)) return "not on record for this rollout";
    const most = scale(one);
    return MODES[mode].about + (most === null ? "" : most ? `; strongest at ${most.toPrecision(2)}` : "; it is 0 on every token");
  }

  function painter(one) {
    const values = MODES[mode].of(one);
    if (!values) return () => "";
    const most = scale(one);
    if (mode === "mask") return (i) => (one.mask[i] ? "rgba(59,130,246,.22)" : "");
    if (mode === "cache") return (i) => (values[i] === null ? "" : values[i] ? "rgba(13,148,136,.30)" : "rgba(217,119,6,.22)");
    if (mode === "version") return (i) => (values[i] >= 0 ? COLOURS[values[i] % COLOURS.length] + "55" : "");
    return (i) => {
      if (!one.mask[i] || values[i] === null) return "";
      const share = most ? Math.min(1, Math.abs(values[i]) / most) : 0;
      const colour = MODES[mode].ends ? (values[i] < 0 ? "220,38,38" : "22,163,74") : mode === "routing" ? "219,39,119" : "217,119,6";
      return share > 0 ? `rgba(${colour},${(0.06 + 0.6 * share).toFixed(3)})` : "";
    };
  }

  const visible = (word) => word.replace(/\r/g, "␍").replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t").replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]/g, "�");

  function about(one, i) {
    const parts = [`token ${i}, id ${one.ids[i]}, ${JSON.stringify(one.words[i])}`];
    if (one.mask[i]) {
      parts.push(`engine ${said(one.logprobs && one.logprobs[i])}`);
      if (one.trainer) parts.push(`trainer ${said(one.trainer[i])}, ratio ${said(Math.exp(less(one.trainer[i], one.logprobs[i])))}, apart ${small(less(one.trainer[i], one.logprobs[i]))}`);
      if (one.unreplayed) parts.push(`with its own experts ${said(one.unreplayed[i])}, apart ${small(less(one.trainer[i], one.unreplayed[i]))}`);
      if (one.advantages) parts.push(`advantage ${said(one.advantages[i])}`);
      parts.push(`weights ${one.versions[i]}`);
    } else parts.push("given, masked");
    return parts.join("  ");
  }

  // parts: index of the token where it diverges from another rollout, or -1.
  megarl.drawRollout = (root, one, parts = -1) => {
    prepare(one);
    const line = el("div", { class: "about" }, "Point at a token.");
    const turns = el("div");
    const draw = () => {
      const paint = painter(one), marked = [];
      let at = 0, drawn = 0;
      for (const [number, turn] of one.turns.entries()) {
        const spans = [];
        const end = at + turn.tokens;
        for (; at < end && drawn < MOST; at++, drawn++) {
          const span = el("span", {}, visible(one.words[at]) || "·"), colour = paint(at);
          span.dataset.at = at;
          if (colour) span.style.backgroundColor = colour;
          if (at === parts) { span.className = "parts"; marked.span = span; }
          spans.push(span);
        }
        if (at < end) spans.push(el("em", { class: "faint" }, ` … and ${end - at} more tokens`));
        at = end;
        const label = `turn ${number}: ${turn.written ? `policy, ${turn.tokens} tokens, weights ${turn.runs.length ? turn.runs.map(([version, tokens]) => `${version} (${tokens})`).join(", ") : turn.version}${turn.cached > 0 ? `, ${turn.cached} of the ${at - turn.tokens} tokens before it from the cache` : turn.cached === 0 ? ", nothing before it from the cache" : ""}` : `given, masked, ${turn.tokens} tokens`}${turn.reward ? `, reward ${said(turn.reward)}` : ""}`;
        marked.push(el("div", { class: turn.written ? "turn written" : "turn" }, el("h4", {}, label), el("div", { class: "tokens" }, ...spans)));
      }
      turns.replaceChildren(...marked);
      if (marked.span) setTimeout(() => marked.span.scrollIntoView({ block: "center" }));
      for (const button of bar.children) button.classList.toggle("on", button.dataset.mode === mode);
      note.textContent = explained(one);
    };
    const bar = el("div", { class: "modes" }, ...Object.entries(MODES).map(([name, { label }]) => {
      const button = el("button", { onclick: () => { mode = name; draw(); } }, label);
      button.dataset.mode = name;
      if (!MODES[name].of(one)) { button.disabled = true; button.title = "not on record for this rollout"; }
      return button;
    }));
    const note = el("span", { class: "faint" });
    turns.onmouseover = (event) => { if (event.target.dataset.at) line.textContent = about(one, +event.target.dataset.at); };
    const unscored = Object.entries(one.unscored);
    const figures = [["prompt", `${one.id ?? "?"}${one.data_source ? ` (${one.data_source})` : ""}, group ${one.group}${one.episode >= 0 ? `, episode ${one.episode}` : ""}`],
      ["reward", unscored.length ? "none: " + unscored.map(([part, why]) => `${part}: ${why}`).join("; ") : said(one.reward) + (Object.keys(one.reward_parts).length > 1 ? " = " + Object.entries(one.reward_parts).map(([part, value]) => `${part} ${said(value)}`).join(", ") : "")],
      ["advantage", said(one.advantage)], ["ended by", one.status + (one.failure ? ": " + one.failure : "")],
      ["truth", one.ground_truth === "null" ? null : one.ground_truth], ["tools", one.tool_calls ? `${one.tool_calls} calls, ${one.tool_errors} failed` : null],
      ["branch", one.branch === null || one.branch === undefined ? null : `${one.branch}, ${one.forks} forks${one.drift ? ", drift" : ""}`], ["seed", String(one.seed)]];
    const words = el("details", {}, el("summary", { class: "faint" }, "the conversation in words"), ...one.messages.map(({ role, text }) =>
      el("div", { class: role === "assistant" ? "turn written" : "turn" }, el("h4", {}, role), el("div", { class: "tokens" }, visible(text)))));
    root.replaceChildren(el("h3", {}, `step ${one.step}, rollout ${one.number}`), el("dl", { class: "figures" },
      ...figures.filter(([, value]) => value !== null && value !== undefined).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    bar, note, turns, one.messages.length ? words : "", line);
    draw();
  };

  megarl.showRollout = async (root, run, step, number, parts = -1) => {
    const asked = (root.asked = {});
    try {
      const one = await megarl.rollout(run, step, number);
      if (root.asked !== asked) return null; // another rollout was selected meanwhile
      if (!one) throw new Error("this rollout cannot be read; see the notes at the top");
      megarl.drawRollout(root, one, parts);
      return one;
    } catch (error) {
      if (root.asked === asked) root.replaceChildren(el("h3", {}, `step ${step}, rollout ${number}`), el("p", { class: "faint" }, error.message));
      return null;
    }
  };
}
