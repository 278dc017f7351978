"use strict";
// Compares two runs side by side, from where they diverge.
{
  const state = { other: 1, step: null, number: null };

  function between(a, b) {
    const shared = Math.min(a.ids.length, b.ids.length);
    for (let i = 0; i < shared; i++) if (a.ids[i] !== b.ids[i]) return i;
    return a.ids.length === b.ids.length ? -1 : shared;
  }

  function sentence(found) {
    if (!found) return "";
    const tokens = found.tokens ? `Tokens part at step ${found.tokens.step}, rollout ${found.tokens.number}, token ${found.tokens.token}.`
      : found.steps ? `All tokens are the same in the ${found.steps} steps that both have.` : "They have no recorded step in common.";
    return tokens + (found.metrics ? ` Figures part at step ${found.metrics.step}: ${found.metrics.names.join(", ")}.` : " No figure parts that both have.");
  }

  megarl.views.Compare = {
    async draw(root) {
      const runs = megarl.overview.runs;
      if (runs.length < 2) { root.replaceChildren(el("p", { class: "faint" }, "Name two runs or more: tools/view.py RUN RUN")); return; }
      const found = megarl.overview.partings[state.other - 1];
      if (state.step === null) [state.step, state.number] = found && found.tokens ? [found.tokens.step, found.tokens.number] : [runs[0].steps.at(-1) ?? 1, 0];
      const left = el("section", { class: "card" }), right = el("section", { class: "card" }), where = el("p", { class: "faint" });
      const load = async () => {
        const [a, b] = await Promise.all([megarl.showRollout(left, 0, state.step, state.number), megarl.showRollout(right, state.other, state.step, state.number)]);
        for (const [side, run] of [[left, 0], [right, state.other]]) side.prepend(el("strong", {}, runs[run].name));
        if (!a || !b) { where.textContent = ""; return; }
        const at = between(a, b);
        where.textContent = at < 0 ? "These two have the same tokens." : `These two part at token ${at}.`;
        if (at >= 0) { megarl.drawRollout(left, a, at); megarl.drawRollout(right, b, at); for (const [side, run] of [[left, 0], [right, state.other]]) side.prepend(el("strong", {}, runs[run].name)); }
      };
      const field = (name) => el("input", { type: "number", min: 0, value: state[name], onchange: (event) => { state[name] = +event.target.value; load(); } });
      const other = el("select", { onchange: (event) => { state.other = +event.target.value; state.step = null; this.draw(root); } }, ...runs.slice(1).map((run, i) => el("option", { value: i + 1, selected: i + 1 === state.other }, run.name)));
      root.replaceChildren(el("p", {}, el("strong", {}, `${runs[0].name} and ${runs[state.other].name}: `), sentence(found)),
        el("div", { class: "bar" }, el("label", {}, "with ", other), el("label", {}, "step ", field("step")), el("label", {}, "rollout ", field("number")), where), el("div", { class: "split even" }, left, right));
      await load();
    },
  };
}
