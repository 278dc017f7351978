"use strict";
// Compares two runs side by side, from where they diverge.
{
  const state = { other: 1, step: null, number: null };

  function between(a, b) {
    const length = Math.min(a.ids.length, b.ids.length);
    for (let i = 0; i < length; i++) if (a.ids[i] !== b.ids[i]) return i;
    return a.ids.length === b.ids.length ? -1 : length;
  }

  function sentence(divergence) {
    if (!divergence) return "";
    const tokens = divergence.tokens ? `Tokens part at step ${divergence.tokens.step}, rollout ${divergence.tokens.number}, token ${divergence.tokens.token}.`
      : divergence.steps ? `All tokens are the same in the ${divergence.steps} steps that both have.` : "They have no recorded step in common.";
    return tokens + (divergence.metrics ? ` Figures part at step ${divergence.metrics.step}: ${divergence.metrics.names.join(", ")}.` : " No figure parts that both have.");
  }

  megarl.views.Compare = {
    async draw(root) {
      const runs = megarl.overview.runs;
      if (runs.length < 2) { root.replaceChildren(el("p", { class: "faint" }, "Name two runs or more: tools/view.py RUN RUN")); return; }
      const divergence = megarl.overview.partings[state.other - 1];
      if (state.step === null) [state.step, state.number] = divergence && divergence.tokens ? [divergence.tokens.step, divergence.tokens.number] : [runs[0].steps.at(-1) ?? 1, 0];
      const left = el("section", { class: "card" }), right = el("section", { class: "card" }), where = el("p", { class: "faint" });
      const load = async () => {
        const [a, b] = await Promise.all([megarl.showRollout(left, 0, state.step, state.number), megarl.showRollout(right, state.other, state.step, state.number)]);
        for (const [side, run] of [[left, 0], [right, state.other]]) side.prepend(el("strong", {}, runs[run].name));
        if (!a || !b) { where.textContent = ""; return; }
        const token = between(a, b);
        where.textContent = token < 0 ? "These two have the same tokens." : `These two part at token ${token}.`;
        if (token >= 0) { megarl.drawRollout(left, a, token); megarl.drawRollout(right, b, token); for (const [side, run] of [[left, 0], [right, state.other]]) side.prepend(el("strong", {}, runs[run].name)); }
      };
      const field = (name) => el("input", { type: "number", min: 0, value: state[name], onchange: (event) => { state[name] = +event.target.value; load(); } });
      const other = el("select", { onchange: (event) => { state.other = +event.target.value; state.step = null; this.draw(root); } }, ...runs.slice(1).map((run, i) => el("option", { value: i + 1, selected: i + 1 === state.other }, run.name)));
      root.replaceChildren(el("p", {}, el("strong", {}, `${runs[0].name} and ${runs[state.other].name}: `), sentence(divergence)),
        el("div", { class: "bar" }, el("label", {}, "with ", other), el("label", {}, "step ", field("step")), el("label", {}, "rollout ", field("number")), where), el("div", { class: "split even" }, left, right));
      await load();
    },
  };
}
