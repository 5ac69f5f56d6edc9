// What of all sessions is wanted: the fields of the filter, the address that says the same, and what the server is asked.

import { h } from "./dom.js";
import { words } from "./format.js";

const NAMES = ["text", "agent", "tree", "status", "range", "since", "until", "by"];
const STATUSES = ["idle", "running", "waiting_for_model", "waiting_for_child", "waiting_for_input", "waiting_for_timer",
  "waiting_for_queue", "completed", "failed", "cancelled", "quarantined"];
const OUTCOMES = ["completed", "failed", "quarantined", "cancelled", "round_limit", "budget_exceeded"];
export const FAILED = ["failed", "quarantined", "round_limit", "budget_exceeded"];
const RANGES = { "": "any time", hour: "last hour", day: "last day", custom: "from … to …" };
const SECONDS = { hour: 3600, day: 86_400 };

const option = (value, label) => h("option", { value }, label);
const field = (label, input) => h("label", { class: "field" }, h("span", null, label), input);

export class Filters {
  // `changed(typed)` is called when somebody changed something; `typed` while it is being written.
  constructor(changed) {
    const chosen = () => { this.arrange(); changed(false); };
    const typed = () => changed(true);
    this.fields = {
      text: h("input", { type: "search", placeholder: "id, agent or tree  ( / )", "aria-label": "Search sessions", oninput: typed }),
      agent: h("input", { type: "text", placeholder: "exact name", autocomplete: "off", spellcheck: "false", oninput: typed }),
      tree: h("input", { type: "text", placeholder: "the root's id", autocomplete: "off", spellcheck: "false", oninput: typed }),
      status: h("select", { onchange: chosen }, option("", "any status"),
        h("optgroup", { label: "The last run" }, option("last:bad", "did not complete"), OUTCOMES.map((name) => option(`last:${name}`, `last run ${words(name)}`))),
        h("optgroup", { label: "The session now" }, STATUSES.map((name) => option(name, words(name))))),
      range: h("select", { onchange: chosen }, Object.entries(RANGES).map(([value, label]) => option(value, label))),
      since: h("input", { type: "datetime-local", onchange: chosen }),
      until: h("input", { type: "datetime-local", onchange: chosen }),
      by: h("select", { onchange: chosen }, option("", "created"), option("ended_at", "last run ended")),
    };
    const { text, agent, tree, status, range, since, until, by } = this.fields;
    this.custom = [field("From", since), field("To", until)];
    this.element = h("div", { class: "filters", role: "search", "aria-label": "Sessions" }, field("Search", text), field("Agent", agent), field("Status", status),
      field("Time", range), field("Time of", by), this.custom, field("Tree", tree));
  }

  arrange() {
    for (const label of this.custom) label.hidden = this.fields.range.value !== "custom";
  }

  // From an address, and to one.
  set(query) {
    const given = new URLSearchParams(query);
    for (const name of NAMES) if (this.fields[name] !== document.activeElement || this.fields[name].value !== (given.get(name) || "")) this.fields[name].value = given.get(name) || "";
    for (const name of ["status", "range", "by"]) if (this.fields[name].selectedIndex < 0) this.fields[name].value = "";
    this.arrange();
  }

  get query() {
    const custom = this.fields.range.value === "custom";
    return new URLSearchParams(NAMES.filter((name) => this.fields[name].value && (custom || !["since", "until"].includes(name)))
      .map((name) => [name, this.fields[name].value])).toString();
  }

  // The server's parameters. A range that ends now is counted from now.
  get asked() {
    const { text, agent, tree, status, range, since, until, by } = Object.fromEntries(NAMES.map((name) => [name, this.fields[name].value.trim()]));
    const asked = new URLSearchParams();
    const put = (name, value) => { if (value) asked.append(name, value); };
    const micros = (local) => (local ? String(new Date(local).getTime() * 1000) : "");
    put("text", text);
    put("agent", agent);
    put("tree", tree);
    put("by", by);
    if (status === "last:bad") FAILED.forEach((name) => put("outcome", name));
    else if (status.startsWith("last:")) put("outcome", status.slice(5));
    else put("status", status);
    if (SECONDS[range]) put("since", String((Date.now() - SECONDS[range] * 1000) * 1000));
    if (range === "custom") put("since", micros(since)), put("until", micros(until));
    return asked;
  }
}
