// What begins runs, and what keeps them waiting: queues, schedules, and what of these has failed (triage).

import { h, show, sync, text } from "./dom.js";
import { age, counted, moment, words } from "./format.js";
import { polling } from "./polling.js";
import { link, pill, stacked } from "./rows.js";

const QUEUES = ["Queue", "State", "Limits", "At work", "Waiting", "Behind others of their sessions", "Longest wait"];
const SCHEDULES = ["Schedule", "State", "When", "What", "Queue", "Next", "Last", "So far"];
const TRIAGE = ["Failed", "Times", "Last", "Run", "Why", "Entry"];
const COUNTS = ["fired", "triggered", "skipped", "missed", "failed"];

export function schedulesView(main, page) {
  const trouble = h("div");
  const queues = panel("Queues", QUEUES, "There are no queues: understudy queues set NAME makes one.");
  const triage = panel("Open in triage", TRIAGE, "No run of a schedule has failed, or all of that is resolved.");
  const schedules = panel("Schedules", SCHEDULES, "There are no schedules: understudy schedules create NAME makes one.");
  main.append(h("h1", null, "Schedules and queues"), trouble, queues.element, triage.element, schedules.element);
  return polling("/api/schedules", page, trouble, (found) => {
    queues.fill(found.queues, (queue) => queue.name, (queue) => ofQueue(queue, found.at));
    triage.fill(found.triage, (entry) => entry.id, ofEntry);
    schedules.fill(found.schedules, (schedule) => schedule.name, (schedule) => ofSchedule(schedule, found.at));
  }).leave;
}

// A table under its heading, and what is said without rows.
function panel(title, heads, nothing) {
  const { body, element, row } = stacked(title, heads);
  const none = h("p", { class: "quiet" });
  return {
    element: h("section", { class: "panel" }, h("h2", null, title), element, none),
    fill(items, key, cells) {
      text(none, items.length ? "" : nothing);
      sync(body, items, key, row, (made, item) => cells(item).forEach((content, place) => show(made.children[place], content)));
    },
  };
}

export function ofQueue(queue, now) {
  const limits = [queue.concurrency ? `${queue.concurrency} at once` : "", queue.per_key ? `${queue.per_key} per key` : "",
    queue.rate ? `${queue.rate} within ${age(queue.seconds * 1e6)}` : ""];
  return [queue.name, state(queue.paused ? "paused" : "active"), limits.filter(Boolean).join(", ") || "none", queue.at_work, queue.waiting,
    queue.behind, queue.oldest ? age(now - queue.oldest) : "–"];
}

function ofSchedule(schedule, now) {
  const due = schedule.due_at && !schedule.paused ? `${moment(schedule.due_at)}${schedule.due_at > now ? `, in ${age(schedule.due_at - now)}` : ""}` : "–";
  const last = schedule.last_run ? [run(schedule.last_session, schedule.last_run, schedule.last_status ? pill(schedule.last_status) : "removed")] : [];
  const problem = schedule.problem ? [h("div", { class: "quiet" }, schedule.problem)] : [];
  return [schedule.name, state(!schedule.next_at ? "ended" : schedule.paused ? "paused" : "active"), when(schedule), what(schedule),
    schedule.queue ? `${schedule.queue}${schedule.key ? `, key ${schedule.key}` : ""}` : "–", due, [...last, ...problem],
    COUNTS.filter((name) => schedule[name]).map((name) => `${schedule[name]} ${name}`).join(", ") || "–"];
}

function when(schedule) {
  if (schedule.cron) return `${schedule.cron} ${schedule.zone}`;
  return schedule.every ? `every ${age(schedule.every * 1e6)}` : `at ${moment(schedule.at)}`;
}

function what(schedule) {
  const content = h("div", { class: "quiet", title: schedule.content }, schedule.content.length > 80 ? `${schedule.content.slice(0, 80)}…` : schedule.content);
  if (schedule.session_id) return [link(schedule.session_id, "session ", schedule.session_id), content];
  return [schedule.workflow ? `workflow ${schedule.workflow}` : `${schedule.memory ? "loop" : "a session"} of ${schedule.agent}`, content];
}

function ofEntry(entry) {
  return [entry.schedule, counted(entry.count, "time") + (entry.reopened ? `, reopened ${entry.reopened}×` : ""), moment(entry.last_at),
    entry.last_run ? run(entry.last_session, entry.last_run, "its run") : "none begun", [h("b", null, words(entry.code)), ` ${entry.text}`], h("span", { class: "mono" }, entry.id)];
}

const run = (session, id, content) => h("a", { href: `#/session/${encodeURIComponent(session)}/run/${encodeURIComponent(id)}`, title: id }, content);

const state = (name) => h("span", { class: `pill ${{ active: "completed", paused: "waiting_for_input" }[name] || ""}` }, name);
