"use strict";
// Text files of the run: its log, those of engines and rewards, the user's code, and changes of the configuration.
{
  const state = { name: "", filter: "" };

  function drawText(pane, { name, text, is_cut: isCut }) {
    const lines = text.split("\n");
    const shown = state.filter ? lines.filter((line) => line.includes(state.filter)) : lines;
    const count = state.filter ? `${shown.length} of ${lines.length} lines` : "";
    const note = isCut ? "only the end of the file is shown" : "";
    const title = el("h3", {}, name, el("span", {}, [count, note].filter(Boolean).join(", ")));
    pane.replaceChildren(title, el("pre", {}, shown.join("\n")));
  }

  megarl.views.Files = {
    async draw(root) {
      root.replaceChildren(createHint("Loading the files …"));
      const blockName = "texts-" + megarl.runIndex;
      if (megarl.overview.is_live) megarl.blocks.delete(blockName); // a log grows
      const texts = await megarl.loadBlock(blockName);
      if (!texts.length) {
        root.replaceChildren(createHint("The run folder has no log and no code."));
        return;
      }
      const pane = el("section", { class: "card file" });
      const getSelected = () => texts.find(({ name }) => name === state.name) || texts[0];
      const redraw = () => {
        for (const button of list.children) button.classList.toggle("selected", button.textContent === getSelected().name);
        drawText(pane, getSelected());
      };
      const select = (event) => {
        state.name = event.target.textContent;
        redraw();
      };
      const filter = (event) => {
        state.filter = event.target.value;
        redraw();
      };
      const list = el("div", { class: "modes" }, ...texts.map(({ name }) => el("button", { onclick: select }, name)));
      const search = { type: "search", placeholder: "only lines with this text", value: state.filter, oninput: filter };
      root.replaceChildren(list, el("div", { class: "toolbar" }, el("input", search)), pane);
      redraw();
      if (getSelected().name === "log.txt") pane.scrollTop = pane.scrollHeight;
    },
  };
}
