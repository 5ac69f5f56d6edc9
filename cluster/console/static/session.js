// One session within its tree: states over time, events, traces, messages, runs and budgets; and what a person can do.

import { get, here, of, post, stream } from "./api.js";
import { ask, h, rowKeys, show, sync, text } from "./dom.js";
import { FAILED } from "./filters.js";
import { link, pill } from "./rows.js";
import { age, amount, brief, clock, counted, kind, moment, money, plain, short, summary, words } from "./format.js";
import { lane, timeline } from "./timeline.js";
import { waterfall } from "./waterfall.js";

const PARTS = [["events", "Events"], ["trace", "Trace"], ["messages", "Messages"], ["steps", "Steps"], ["cost", "Cost and budgets"]];
const SHOWN_EVENTS = 300;
const KEPT_EVENTS = 20_000; // of the tree; as many as the server's log has
const SPANS = { run: "the last run", minute: "1 minute", ten: "10 minutes", all: "all" };

export function sessionView(main, wanted, page) {
  const view = new SessionView(main, wanted, page);
  const leave = () => view.leave();
  leave.go = (next) => view.go(next);
  return leave;
}

class SessionView {
  constructor(main, { session, part, run }, page) {
    Object.assign(this, { id: session, part, run, page, rows: [], events: new Map(), state: null, detail: null, older: [], spans: null,
      opened: new Set(), messages: [], span: "run", problem: "", refusal: "" }); // why nothing could be read; why what a person did was not done
    this.title = h("div", { class: "title" });
    this.trouble = h("div");
    this.actions = h("div", { class: "actions" });
    this.asked = h("div");
    this.tree = h("div", { class: "tree", role: "list", "aria-label": "Tree" });
    rowKeys(this.tree, "a");
    this.legend = h("div", { class: "legend quiet" }, ["running", "model", "tools", "children", "person", "timer", "queued", "down", "crash", "recover"]
      .map((name) => h("span", null, h("i", { class: `s-${name}` }), { crash: "crashed", recover: "restored", model: "waits for a model", children: "for sub-agents", person: "for a person", timer: "for a time" }[name] || name)));
    const span = h("select", { "aria-label": "Time shown", onchange: (event) => { this.span = event.target.value; this.drawTree(); } },
      Object.entries(SPANS).map(([value, label]) => h("option", { value }, label)));
    this.axis = h("div", { class: "axis quiet" });
    this.total = h("span", { class: "quiet" });
    this.tabs = h("div", { class: "tabs", role: "tablist" }, PARTS.map(([name, label]) =>
      h("a", { role: "tab", id: `tab-${name}`, href: `#/session/${encodeURIComponent(session)}/${name}` }, label)));
    this.body = h("div", { role: "tabpanel" });
    const file = h("p", null, h("a", { href: here(`${of(session)}/download`), download: `${session}.jsonl`, title: "As JSON Lines. The command understudy store export makes an archive that can be imported." }, "Download messages and events"));
    main.append(this.title, file, this.trouble, this.asked,
      h("section", { class: "panel" }, h("div", { class: "bar" }, h("h2", null, "Tree"), this.total, h("span", { class: "space" }), span), this.axis, this.tree, this.legend),
      h("section", { class: "panel" }, this.tabs, this.body));
    this.buildEvents();
    this.open();
    this.ticking = setInterval(() => this.drawTree(), 1000);
  }

  leave() {
    clearInterval(this.ticking);
    clearTimeout(this.later);
    this.gone = true;
    if (this.close) this.close();
  }

  go({ part, run }) {
    Object.assign(this, { part, run: run || (part === "trace" ? this.run : "") });
    this.drawPart();
    this.load();
  }

  open() {
    this.close = stream(`${of(this.id)}/stream`, {
      reset: () => this.forget(new Map()),
      log: (events) => this.take(events),
      state: (state) => {
        const written = (known) => (known?.rows || []).map((row) => row.updated_at).join();
        const changed = written(state) !== written(this.state);
        this.state = state;
        this.drawTree();
        this.drawTitle();
        if (changed || this.problem || this.detail?.waits_in) this.soon(); // its place in a queue changes with others
      },
    }, { state: this.page.state, refused: this.page.refused, check: () => get(of(this.id)) });
    this.drawPart();
    this.load();
  }

  take(events) {
    for (const event of events) {
      const known = this.events.get(event.session_id);
      if (known) known.push(event);
      else this.events.set(event.session_id, [event]);
    }
    const times = [...this.events.values()].flat().map((event) => event.at);
    if (times.length > KEPT_EVENTS * 1.25) {
      const oldest = times.sort((a, b) => a - b).at(-KEPT_EVENTS);
      const since = (known) => known.slice(known.findIndex((event) => event.at >= oldest));
      this.forget(new Map([...this.events].filter(([, known]) => known.at(-1).at >= oldest).map(([id, known]) => [id, since(known)])));
    }
    this.drawTree();
    if (this.part === "events") this.drawEvents();
    this.soon();
  }

  // Only these are known; earlier ones can be read again, without a gap to these.
  forget(known) {
    Object.assign(this, { events: known, older: [], end: false });
  }

  // What is read beside the stream is read again when something happened: once, however much it was.
  soon() {
    if (!this.later) this.later = setTimeout(() => { this.later = null; this.load(); }, 400);
  }

  async load() {
    if (this.gone) return;
    try {
      this.detail = await get(of(this.id));
      if (this.part === "trace") {
        const run = this.run || this.detail.runs[0]?.run_id;
        this.trace = run ? await get(`${of(this.id)}/trace?run=${encodeURIComponent(run)}`) : { spans: [] };
      } else if (this.part === "messages") {
        const after = this.messages.at(-1)?.seq || 0;
        const found = (await get(`${of(this.id)}/messages?after=${after}`)).messages;
        this.messages.push(...found.filter((message) => message.seq > (this.messages.at(-1)?.seq || 0)));
      }
      this.problem = "";
    } catch (error) {
      if (error.status === 404 || error.status === 401) {
        if (error.status === 401 || !this.detail) return this.leave(), this.page.refused(error);
      }
      this.problem = error.message;
    }
    if (this.gone) return;
    this.drawTitle();
    this.drawPart();
  }

  drawTitle() {
    const info = this.detail?.session;
    if (!info) return;
    const row = this.state?.rows.find((other) => other.session_id === this.id) || info;
    const facts = [`epoch ${row.epoch}`, row.actor_pid ? `pid ${row.actor_pid}` : "in no process", row.node_id ? `node ${row.node_id.slice(0, 8)}` : "",
      `${short(row.tokens_used)} tokens itself`, row.cost_used ? `cost ${money(row.cost_used)}` : "", row.tokens_redone ? `${short(row.tokens_redone)} paid twice` : "",
      `created ${moment(row.created_at)}`].filter(Boolean);
    show(this.title, h("p", { class: "quiet" }, h("a", { href: this.page.fleet }, "Sessions"), row.parent_id ? [" / ", link(row.root_id, "tree ", brief(row.root_id)), " / ", link(row.parent_id, "parent")] : ""),
      h("h1", null, row.agent, " ", info.kind === "workflow" ? [h("span", { class: "pill" }, "workflow"), " "] : "", pill(row.status), row.restarts ? h("span", { class: "pill session_crashed" }, `restored ${row.restarts}×`) : "", row.closed ? h("span", { class: "pill" }, "closed") : ""),
      h("p", { class: "mono" }, row.session_id), h("p", { class: "quiet" }, facts.join(" · ")),
      row.status === "waiting_for_queue" && this.detail.waits_in ? h("p", null, waitsIn(this.detail.waits_in)) : "");
    const trouble = [this.refusal, this.problem, this.state?.problem && `${this.state.problem.message} ${this.state.problem.hint}`, row.error && `${row.error.code}: ${row.error.message}`];
    show(this.trouble, trouble.filter(Boolean).map((line) => h("p", { class: "problem", role: "alert" }, line)),
      this.state?.truncated ? h("p", { class: "quiet" }, "The tree is long: its first events are not shown here. Those of this session are below.") : "");
    this.tabs.querySelector("#tab-steps").hidden = info.kind !== "workflow";
    this.drawActions(row);
    this.drawAsked();
  }

  drawActions(row) {
    if (!this.page.me.may_act) return this.actions.remove();
    if (!this.actions.isConnected) this.trouble.before(this.actions);
    const last = this.detail?.runs[0];
    const offered = [
      ["cancel", "Cancel the run", row.active, "Its run ends, and all that it spawned. What it did stays."],
      ["send", "Send an input", !row.closed && row.status !== "quarantined", "It begins a run, or waits for the one under way to end."],
      ["signal", "Send a signal", row.active && this.detail?.workflow, "A step that waits for this name goes on with it; else it is kept for the next one."],
      ["run-again", "Run again", !row.closed && FAILED.includes(last?.status), `The input of run ${last && brief(last.run_id)}, which ended ${words(last?.status)}, is sent again.${row.status === "quarantined" ? " The session is resumed for it." : ""}`, { run_id: last?.run_id }],
      ["resume", "Resume", row.status === "quarantined", "It takes input again; its ended runs stay ended."],
      ["abort-pending", "Give up what waits", row.status === "waiting_for_input", "The calls that wait for a person are given up, and the run goes on."],
      ["close", "Close", !row.closed, "It takes no more input, and what runs is cancelled. This can't be taken back."],
    ].filter(([, , possible]) => possible);
    sync(this.actions, offered, ([name, , , meaning]) => `${name} ${meaning}`, ([name, label, , meaning, more = {}]) => h("button", { onclick: async () => {
      if (name === "send") return this.send(row, meaning);
      if (name === "signal") return this.signal(row, meaning);
      const fields = name === "cancel" || name === "close" ? [["reason", "Reason", "asked for in the console"]] : [];
      const entered = await ask(`${label}?`, `${row.agent} ${this.id}. ${meaning}`, label, fields);
      if (entered) this.act(this.id, name, { ...entered, ...more });
    } }, label), () => {});
  }

  async act(session, action, body) {
    try {
      await post(`${of(session)}/${action}`, body);
      this.refusal = "";
    } catch (error) {
      this.refusal = `${error.message} ${error.hint || ""}`.trim();
    }
    this.load();
  }

  drawAsked() {
    const asked = (this.state?.rows || []).flatMap((row) => (row.pending || []).map((item) => ({ ...item, session: row.session_id, agent: row.agent })));
    sync(this.asked, asked, (item) => `${item.session}/${item.call_id}/${item.asked}`, (item) =>
      h("section", { class: "panel asks" }, h("h2", null, { in_doubt: "Did this happen?", approval: "May it?" }[item.kind] || "Asks a person"),
        h("p", { class: "quiet" }, item.agent, " · ", link(item.session, brief(item.session)), ` · since ${moment(item.asked_at)}`), h("p", { class: "said" }, item.prompt),
        this.page.me.may_act && item.kind === "approval" ? this.approval(item, asked)
          : this.page.me.may_act ? h("div", { class: "bar" }, (item.options || []).map((option) => h("button", { onclick: () => this.answer(item, "ok", option) }, option)),
          h("button", { onclick: () => this.answer(item, "ok") }, "Answer …"), h("button", { onclick: () => this.answer(item, "error") }, "It failed …"),
          item.kind === "in_doubt" ? h("button", { onclick: () => this.answer(item, "rerun") }, "Run it again") : null)
          : h("p", { class: "mono quiet" }, item.kind === "approval" ? `understudy approve ${item.session} ${item.call_id}` : `understudy answer ${item.session} ${item.call_id} TEXT`)), () => {});
  }

  // The run's id is made here, so that an input that is sent again is accepted once.
  async send(row, meaning) {
    const entered = await ask("Send an input", `${row.agent} ${this.id}. ${meaning}`, "Send", [["text", "The input", "", 5]]);
    const run_id = [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
    if (entered?.text.trim()) this.act(this.id, "send", { text: entered.text, run_id });
  }

  async signal(row, meaning) {
    const waited = this.detail.workflow.open.find((step) => step.tool === "event");
    const entered = await ask("Send a signal", `${row.agent} ${this.id}. ${meaning}`, "Send", [["name", "Its name", /"name": ?"([^"]+)"/.exec(waited?.arguments)?.[1] || ""], ["payload", "What the step returns, as JSON", "null", 4]]);
    if (!entered) return;
    let payload;
    try {
      payload = JSON.parse(entered.payload || "null");
    } catch (error) {
      this.refusal = `That is no JSON: ${error.message}. A text is given as "a text".`;
      return this.drawTitle();
    }
    this.act(this.id, "signal", { name: entered.name.trim(), payload });
  }

  approval(item, asked) {
    const beside = asked.filter((other) => other.kind === "approval" && other.session === item.session);
    const decide = (items, decision, more = {}) => this.act(item.session, "decide", { decisions: items.map(({ call_id, asked: times }) => ({ call_id, asked: times, decision, ...more })) });
    const said = async (decision, label, field) => {
      const entered = await ask(label, item.prompt, "Send", [["text", field, "", 4]]);
      if (entered && (entered.text || decision === "reject")) decide([item], decision, { text: entered.text || "" });
    };
    return h("div", { class: "bar" }, h("button", { onclick: () => decide([item], "approve") }, "Approve"),
      h("button", { onclick: () => decide([item], "approve", { remember: "tool" }) }, "Approve this tool for the session"),
      h("button", { onclick: () => said("approve", "Approve with other arguments", "The arguments, as a JSON object") }, "Edit …"),
      h("button", { onclick: () => said("reject", "Reject", "Why, as the model will read it") }, "Reject …"),
      beside.length > 1 ? h("button", { onclick: () => decide(beside, "approve") }, `Approve all ${beside.length}`) : null);
  }

  async answer(item, decision, value = "") {
    const rerun = decision === "rerun";
    const entered = await ask(rerun ? "Run it again?" : "Answer", item.prompt, rerun ? "Run it again" : "Send", rerun ? [] : [["text", "The call's result, as the model will read it", value, 4]]);
    if (entered && (rerun || entered.text)) this.act(item.session, "answer", { call_id: item.call_id, asked: item.asked, decision, text: entered.text || "" });
  }

  range(now) {
    const rows = this.state.rows;
    const all = [...this.events.values()].flat();
    if (!all.length) return [now - 60e6, now];
    const [first, last] = all.reduce(([low, high], { at }) => [Math.min(low, at), Math.max(high, at)], [Infinity, 0]);
    const end = rows.some((row) => row.active) ? now : last;
    if (this.span === "minute") return [end - 60e6, end];
    if (this.span === "ten") return [end - 600e6, end];
    if (this.span === "all") return [first, end];
    const started = (this.events.get(rows[0]?.session_id) || []).findLast((event) => event.type === "run_accepted");
    return [started ? Math.min(started.at, end) : first, end];
  }

  drawTree() {
    if (!this.state) return;
    const now = Math.max(Date.now() * 1000, this.state.at);
    const [from, to] = this.range(now);
    show(this.axis, h("span", null, clock(from, true)), h("span", null, age(to - from)), h("span", null, clock(to, true)));
    const root = this.state.rows[0];
    const count = this.state.rows.length;
    text(this.total, root ? `${counted(count, "session")}, ${short(root.tokens_below)} tokens in all` + (root.cost_below ? `, cost ${money(root.cost_below)}` : "") : "");
    const level = root ? root.depth : 0;
    const names = this.state.rows.map((row) => row.agent);
    const alike = new Set(names.filter((name, place) => names.indexOf(name) !== place));
    sync(this.tree, inTree(this.state.rows), (row) => row.session_id, (row) => {
      const label = h("a", { class: "who", href: `#/session/${encodeURIComponent(row.session_id)}`, title: row.session_id });
      const element = h("div", { class: "row", role: "listitem" }, label, h("div", { class: "lanes" }));
      element.dataset.session = row.session_id;
      label.style.paddingLeft = `${Math.min(8, row.depth - level) * 0.9 + 0.4}rem`;
      return element;
    }, (element, row) => {
      const [label, lanes] = element.children;
      element.classList.toggle("chosen", row.session_id === this.id);
      show(label, h("span", { class: "agent" }, row.agent), alike.has(row.agent) ? h("span", { class: "quiet mono which" }, row.session_id.slice(-6)) : "", pill(row.status), row.restarts ? h("span", { class: "bad restarts", title: "restored after crashes" }, `↻${row.restarts}`) : "",
        (row.tools || []).length ? h("span", { class: "quiet tools" }, multiples(row.tools)) : "",
        h("span", { class: "tokens quiet", title: `${row.tokens_used} tokens itself, ${row.tokens_below} with all below` }, `${short(row.tokens_below)} tokens`));
      lanes.replaceChildren(lane(timeline(this.events.get(row.session_id) || []), from, to));
    });
  }

  buildEvents() {
    this.filter = h("input", { type: "search", placeholder: "type or text  ( / )", "aria-label": "Filter events", oninput: () => this.drawEvents() });
    this.whole = h("select", { "aria-label": "Whose events", onchange: () => this.drawEvents() }, h("option", { value: "" }, "this session"), h("option", { value: "tree" }, "the whole tree"));
    this.paused = h("button", { "aria-pressed": "false", onclick: () => {
      const held = this.paused.getAttribute("aria-pressed") === "true";
      this.paused.setAttribute("aria-pressed", String(!held));
      text(this.paused, held ? "Pause" : "Go on");
      this.drawEvents();
    } }, "Pause");
    this.list = h("ol", { class: "events" });
    this.counted = h("p", { class: "quiet" });
    this.more = h("button", { onclick: () => this.loadOlder() }, "Earlier events");
    this.eventLog = h("div", null, h("div", { class: "bar" }, this.filter, this.whole, this.paused), this.list, this.counted, this.more);
  }

  async loadOlder() {
    const first = Math.min(...this.older.map((event) => event.seq), ...(this.events.get(this.id) || []).map((event) => event.seq));
    const before = Number.isFinite(first) ? `?before=${first}` : "";
    const { events } = await get(`${of(this.id)}/events${before}`);
    this.older.unshift(...events);
    this.end = !events.length;
    this.shown = (this.shown || SHOWN_EVENTS) + SHOWN_EVENTS;
    this.drawEvents();
  }

  drawEvents() {
    if (this.paused.getAttribute("aria-pressed") === "true") return;
    const tree = this.whole.value === "tree";
    const own = [...this.older, ...(this.events.get(this.id) || [])];
    const all = tree ? [...this.events.values()].flat().sort((a, b) => a.at - b.at || a.seq - b.seq) : own;
    const wanted = this.filter.value.toLowerCase();
    const found = wanted ? all.filter((event) => `${event.type} ${words(event.type)} ${event.agent} ${event.session_id} ${summary(event)}`.toLowerCase().includes(wanted)) : all;
    const limit = this.shown || SHOWN_EVENTS;
    const newest = found.slice(-limit).reverse();
    sync(this.list, newest, (event) => `${event.session_id}/${event.seq}`, (event) => {
      const raw = h("pre");
      return h("li", { class: event.type }, h("details", { ontoggle: () => { if (!raw.textContent) text(raw, JSON.stringify(event, null, 2)); } },
        h("summary", null, h("time", null, clock(event.at, true)), h("span", { class: "seq quiet" }, event.seq), h("span", { class: "whose" }, event.agent),
          h("span", { class: `pill ${kind(event)}` }, words(event.type)), h("span", { class: "summary" }, summary(event))), raw));
    }, () => {});
    this.list.classList.toggle("of-tree", tree);
    text(this.counted, `${newest.length} of ${found.length} events${tree ? ", in the order of their times; only each session's own order is certain" : ""}`);
    this.more.hidden = tree || this.end || (own[0]?.seq ?? 0) <= 1;
  }

  drawPart() {
    for (const tab of this.tabs.children) tab.setAttribute("aria-selected", String(tab.id === `tab-${this.part}`));
    this.body.setAttribute("aria-labelledby", `tab-${this.part}`);
    if (this.part === "events") {
      if (this.body.firstChild !== this.eventLog) this.body.replaceChildren(this.eventLog);
      return this.drawEvents();
    }
    if (this.part === "trace") return this.drawTrace();
    if (this.part === "messages") return this.drawMessages();
    if (this.part === "steps") return show(this.body, this.detail?.workflow ? steps(this.detail.workflow) : h("p", { class: "quiet" }, this.detail ? "This session is no workflow." : "Loading …"));
    if (this.detail) show(this.body, spending(this.state?.rows || []), runs(this.id, this.detail), budgets(this.id, this.detail.budgets), wakeups(this.detail.wakeups));
  }

  drawTrace() {
    if (!this.trace || !this.detail) return show(this.body, h("p", { class: "quiet" }, "Loading …"));
    const chosen = this.run || this.detail.runs[0]?.run_id;
    const focused = document.activeElement?.classList.contains("span") ? [...this.body.querySelectorAll("button.span")].indexOf(document.activeElement) : -1;
    const choose = h("select", { "aria-label": "Run", onchange: (event) => { location.hash = `#/session/${encodeURIComponent(this.id)}/run/${encodeURIComponent(event.target.value)}`; } },
      this.detail.runs.map((run) => h("option", { value: run.run_id, selected: run.run_id === chosen }, `${run.run_id} · ${words(run.status)} · ${moment(run.accepted_at)}`)));
    if (this.body.contains(document.activeElement) && document.activeElement.tagName === "SELECT") return;
    const part = this.trace.truncated ? h("p", { class: "quiet" }, `The trace is long: ${this.trace.events.toLocaleString("en")} of its events are drawn, and more are not. The command understudy trace draws all.`) : "";
    this.body.replaceChildren(h("div", { class: "bar" }, choose), part, waterfall(this.trace.spans, this.opened, () => this.drawTrace()));
    if (focused >= 0) this.body.querySelectorAll("button.span")[focused]?.focus();
  }

  drawMessages() {
    if (!this.chat) this.chat = h("ol", { class: "messages" });
    if (this.body.firstChild !== this.chat) this.body.replaceChildren(this.chat);
    sync(this.chat, this.messages, (message) => message.seq, (message) =>
      h("li", { class: message.role }, h("p", { class: "quiet" }, `${spokenBy(message)}${message.name ? ` ${message.name}` : ""} · ${message.seq}${message.created_at ? ` · ${moment(message.created_at)}` : ""}`),
        h("div", { class: "said" }, ofWorkflow(message, "system") ? JSON.stringify(message.extra.value) : plain(message.content)),
        (message.tool_calls || []).map(([id, name, given]) => h("details", null,
          h("summary", { title: id }, ofWorkflow(message, "assistant") ? `step ${id.slice(message.run_id.length + 1)} ` : "calls ", h("b", null, name), " ", h("span", { class: "quiet mono" }, given.length > 120 ? `${given.slice(0, 120)}…` : given)), h("pre", null, given)))), () => {});
    if (!this.messages.length) this.chat.dataset.empty = "No messages yet."; else delete this.chat.dataset.empty;
  }
}

// What a workflow's code has asked for, or a value that it has taken.
const ofWorkflow = (message, role) => message.origin === "workflow" && message.role === role;

function spokenBy(message) {
  if (ofWorkflow(message, "system")) return `value ${message.extra.name}`;
  return ofWorkflow(message, "assistant") ? "workflow" : message.role;
}

// Rows below their parents; the server gives parents before children.
export function inTree(rows) {
  const below = new Map();
  const known = new Set(rows.map((row) => row.session_id));
  const tops = rows.filter((row) => !known.has(row.parent_id));
  for (const row of rows) if (known.has(row.parent_id)) below.set(row.parent_id, [...(below.get(row.parent_id) || []), row]);
  const ordered = [], waiting = tops.reverse();
  while (waiting.length) {
    const row = waiting.pop();
    ordered.push(row);
    waiting.push(...(below.get(row.session_id) || []).reverse());
  }
  return ordered;
}

// `spawn_agent ×2, look`
function multiples(names) {
  return [...new Set(names)].map((name) => [name, names.filter((other) => other === name).length])
    .map(([name, count]) => (count > 1 ? `${name} ×${count}` : name)).join(", ");
}

// Who of the tree spent what, the most first.
function spending(rows) {
  const sorted = [...rows].sort((a, b) => b.cost_used - a.cost_used || b.tokens_used - a.tokens_used).slice(0, 50);
  const all = rows[0]?.tokens_below || 1;
  return [h("h3", null, "The tree"), h("div", { class: "scroll" }, h("table", null,
    h("thead", null, h("tr", null, ["Agent", "Tokens", "Cost", "Tokens with all below", "Cost with all below", "Paid twice", "Share"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", null, sorted.map((row) => h("tr", null, h("td", null, link(row.session_id, row.agent)), h("td", null, short(row.tokens_used)), h("td", null, money(row.cost_used)),
      h("td", null, short(row.tokens_below)), h("td", null, money(row.cost_below)), h("td", null, row.tokens_redone ? short(row.tokens_redone) : "–"),
      h("td", null, h("meter", { class: "share", min: 0, max: all, value: row.tokens_used, "aria-label": "share of the tree's tokens" }))))))), 
    rows.length > 50 ? h("p", { class: "quiet" }, `The 50 of ${rows.length} sessions that spent most.`) : ""];
}

function runs(session, detail) {
  return [h("h3", null, "Runs"), detail.runs.length ? h("div", { class: "scroll" }, h("table", null,
    h("thead", null, h("tr", null, ["Run", "Status", "From", "Rounds", "Tokens", "Cost", "Took", "Accepted"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", null, detail.runs.map((run) => {
      const usage = run.usage || [];
      return h("tr", null, h("td", null, h("a", { href: `#/session/${encodeURIComponent(session)}/run/${encodeURIComponent(run.run_id)}`, title: run.run_id }, brief(run.run_id))),
        h("td", null, pill(run.status), run.error ? h("div", { class: "quiet" }, run.error.message) : ""), h("td", null, run.source), h("td", null, run.finished_at ? run.rounds : "–"),
        h("td", null, run.finished_at ? short((usage[0] || 0) + (usage[1] || 0)) : "–"),
        h("td", null, money(usage[5])), h("td", null, run.finished_at ? age(run.finished_at - (run.started_at || run.accepted_at)) : "–"), h("td", null, moment(run.accepted_at)));
    })))) : h("p", { class: "quiet" }, "No runs yet.")];
}

// What a workflow is at: what its code waits for, what came of the last steps, and what it says of itself.
function steps({ open, done, published }) {
  const table = (columns, rows) => h("div", { class: "scroll" }, h("table", null, h("thead", null, h("tr", null, columns.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", null, rows.map((cells) => h("tr", null, cells.map((cell) => h("td", null, cell)))))));
  const named = Object.entries(published);
  return [h("h3", null, "Open steps"), open.length ? table(["Step", "Of", "With", "State", "Since"], open.map((step) =>
    [h("span", { class: "mono" }, step.path), step.child_id ? link(step.child_id, step.tool) : step.tool, h("span", { class: "mono" }, step.arguments), words(step.state), moment(step.since)])) : h("p", { class: "quiet" }, "No step is open."),
    h("h3", null, "Last results"), done.length ? table(["Step", "Of", "Came to", "Result", "At"], done.map((step) =>
      [h("span", { class: "mono" }, step.path), step.tool, words(step.outcome), step.text, moment(step.at)])) : h("p", { class: "quiet" }, "No step has a result yet."),
    named.length ? [h("h3", null, "Published"), table(["Name", "Value"], named.map(([name, value]) => [name, h("span", { class: "mono" }, JSON.stringify(value))]))] : ""];
}

function budgets(session, rows) {
  return [h("h3", null, "Budgets"), rows.length ? h("div", { class: "scroll" }, h("table", null,
    h("thead", null, h("tr", null, ["Limit", "Scope", "Of", "Spent", "Reserved", "Allowed", ""].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", null, rows.map((row) => h("tr", null, h("td", null, row.resource), h("td", null, row.scope),
      h("td", null, row.session_id === session ? "itself" : brief(row.session_id)), h("td", null, row.resource === "depth" ? "–" : amount(row.resource, row.spent)),
      h("td", null, row.reserved ? amount(row.resource, row.reserved) : "–"), h("td", null, amount(row.resource, row.allowed)),
      h("td", null, row.resource === "depth" ? "" : h("meter", { min: 0, max: row.allowed || 1, high: row.allowed * 0.8, optimum: 0, value: Math.min(row.allowed, row.spent + row.reserved), "aria-label": "used" }))))))) :
    h("p", { class: "quiet" }, "Nothing limits this session, or the trees that it is in.")];
}

function waitsIn({ queue, key, priority, place, waiting, accepted_at, paused }) {
  const details = [key ? `key ${key}` : "", priority ? `priority ${priority}` : "", `since ${moment(accepted_at)}`, paused ? "which is paused" : ""].filter(Boolean);
  return ["Waits in queue ", h("a", { href: "#/schedules" }, queue), `, place ${place} of ${waiting}, ${details.join(", ")}`];
}

function wakeups(rows) {
  return rows.length ? [h("h3", null, "Wakeups"), h("ul", null, rows.map((item) => h("li", null, h("b", null, item.name), ` ${moment(item.due_at)}${item.every ? `, then every ${item.every} s` : ""}: `, item.prompt)))] : "";
}
