// Many sessions at once: which are chosen, and one request for each of them, the same as for one.

import { get, of, post } from "./api.js";
import { ask, h, text } from "./dom.js";
import { counted } from "./format.js";
import { link } from "./rows.js";

export const MOST = 1_000; // that "all that match" chooses
const LOOKS = 40; // requests that it takes to find them, at most
const AT_ONCE = 4;
const ACTIONS = [
  ["cancel", "Cancel the runs", "Their runs end, and all that these spawned. What they did stays. Sessions without a run stay as they are."],
  ["run-again", "Run again", "The input of each one's last run is sent again, if that failed, was quarantined, or ran out of rounds or budget. What was quarantined is resumed for it. Others stay as they are."],
  ["resume", "Resume", "Those that were quarantined take input again; their ended runs stay ended. Others stay as they are."],
  ["close", "Close", "They take no more input, and what runs is cancelled. This can't be taken back."],
];

export class Bulk {
  // `asked` gives the filter as the server is asked, `rows` those that are shown; `done` is called after something was done.
  constructor(asked, rows, done) {
    Object.assign(this, { asked, rows, done, chosen: new Map(), boxes: new Map(), last: null });
    this.all = h("input", { type: "checkbox", "aria-label": "Select all that are shown", onchange: () => {
      for (const row of rows()) this.choose(row, this.all.checked);
      this.draw();
    } });
    this.status = h("span", { role: "status" });
    this.verbs = ACTIONS.map(([name, label, meaning]) => h("button", { onclick: () => this.act(name, label, meaning) }, label));
    this.bar = h("div", { class: "bar bulk", role: "group", "aria-label": "Selected sessions" }, this.status, this.verbs,
      h("button", { onclick: () => this.chooseAll() }, "Select all that match"), this.none = h("button", { onclick: () => this.clear() }, "Select none"));
    this.draw();
  }

  choose(row, wanted) {
    if (wanted) this.chosen.set(row.session_id, row.agent);
    else this.chosen.delete(row.session_id);
  }

  clear() {
    this.chosen.clear();
    this.last = null;
    this.draw();
  }

  // A row gets its box. Shift takes all rows from the last one on; the space bar on the row's link is the box as well.
  offer(element, row) {
    const box = h("input", { type: "checkbox", "aria-label": `Select ${row.agent} ${row.session_id}` });
    box.addEventListener("click", (event) => {
      const ids = this.rows().map((other) => other.session_id);
      const [from, to] = [ids.indexOf(this.last), ids.indexOf(row.session_id)];
      const range = event.shiftKey && from >= 0 ? this.rows().slice(Math.min(from, to), Math.max(from, to) + 1) : [row];
      for (const other of range) this.choose(other, box.checked);
      this.last = row.session_id;
      this.draw();
    });
    element.cells_.Agent.addEventListener("keydown", (event) => {
      if (event.key === " ") event.preventDefault(), box.click();
    });
    element.cells_.Select.append(h("label", { class: "box" }, box));
    this.boxes.set(row.session_id, box);
  }

  draw() {
    const shown = this.rows();
    for (const row of shown) if (this.boxes.has(row.session_id)) this.boxes.get(row.session_id).checked = this.chosen.has(row.session_id);
    const here = shown.filter((row) => this.chosen.has(row.session_id)).length;
    this.all.checked = here > 0 && here === shown.length;
    this.all.indeterminate = here > 0 && here < shown.length;
    text(this.status, this.chosen.size ? `${this.chosen.size.toLocaleString("en")} selected` : "None selected");
    for (const button of [...this.verbs, this.none]) button.disabled = !this.chosen.size;
  }

  async chooseAll() {
    const query = this.asked();
    query.set("limit", "500");
    const found = new Map();
    try {
      let next = null, looks = 0;
      do {
        if (next) query.set("cursor", next.join(","));
        const some = await get(`/api/sessions?${query}`);
        for (const row of some.rows) if (found.size < MOST) found.set(row.session_id, row.agent);
        next = some.next;
        looks += 1;
      } while (next && found.size < MOST && looks < LOOKS);
      this.chosen = found;
      this.draw();
      if (next) text(this.status, `${found.size.toLocaleString("en")} selected: the latest; perhaps more match`);
    } catch (error) {
      text(this.status, error.message);
    }
  }

  async act(name, label, meaning) {
    const sessions = [...this.chosen];
    const fields = name !== "cancel" && name !== "close" ? [] : [["reason", "Reason", "asked for in the console"]];
    const entered = await ask(`${label}: ${counted(sessions.length, "session")}?`, meaning, `${label} (${sessions.length.toLocaleString("en")})`, fields);
    if (!entered) return;
    const failed = await each(label, sessions, (session) => (name === "run-again" ? runAgain(session) : post(`${of(session)}/${name}`, entered)));
    this.chosen = new Map(failed);
    this.draw();
    this.done();
  }
}

// The run is named that is done again: so the same request, however often it arrives, begins one run.
async function runAgain(session) {
  const { runs } = await get(of(session));
  return runs.length ? post(`${of(session)}/run-again`, { run_id: runs[0].run_id }) : { done: false };
}

// One request for each, a few at once, in a dialog that says how far it is and what failed. Whoever closes it sooner stops what has
// not been sent. Gives the sessions that are not done: to do it again does no harm.
function each(label, sessions, request) {
  const dialog = document.getElementById("dialog");
  const bar = h("progress", { max: sessions.length, value: 0, "aria-label": label });
  const status = h("p", { role: "status" }), problems = h("ul", { class: "problems" });
  const button = h("button", { class: "primary", onclick: () => dialog.close() }, "Stop");
  const left = new Map(sessions), waiting = [...sessions];
  let done = 0, idle = 0, failed = 0, stopped = false;
  function draw(over) {
    bar.value = done + idle + failed;
    const parts = [`${done} of ${sessions.length} done`, idle ? `${idle} had nothing to do` : "", failed ? `${failed} failed` : ""].filter(Boolean).join(", ");
    text(status, over ? `${parts}.` : `${parts} …`);
  }
  async function work() {
    for (let next; !stopped && (next = waiting.shift());) {
      const [session, agent] = next;
      try {
        if ((await request(session)).done) done += 1;
        else idle += 1;
        left.delete(session);
      } catch (error) {
        failed += 1;
        problems.append(h("li", null, link(session, agent, " ", session), `: ${error.message} ${error.hint || ""}`));
      }
      draw(false);
    }
  }
  return new Promise((resolve) => {
    dialog.setAttribute("aria-label", label);
    dialog.replaceChildren(h("h2", null, label), bar, status, problems, h("div", { class: "buttons" }, button));
    const working = Promise.all(Array.from({ length: AT_ONCE }, work)).then(() => { draw(true); text(button, "Done"); });
    dialog.onclose = async () => {
      stopped = true;
      await working;
      dialog.replaceChildren();
      resolve([...left]);
    };
    problems.addEventListener("click", (event) => { if (event.target.closest("a")) dialog.close(); });
    draw(false);
    dialog.showModal();
    button.focus();
  });
}
