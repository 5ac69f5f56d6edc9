// What a session was doing when: a function of its events.

import { svg } from "./dom.js";
import { age, clock, words } from "./format.js";

const MARKS = {
  session_crashed: "crash", session_quarantined: "crash", shutdown_forced: "crash", cancel_requested: "cancel", session_moved: "move",
};

function stateOf(now) {
  if (now.down) return "down";
  if (!now.run) return now.queued > 0 ? "queued" : "";
  if (now.person > 0) return "person";
  if (now.call) return "model";
  if (now.timers > 0) return "timer";
  if (now.children > 0) return "children";
  return now.tools > 0 ? "tools" : "running";
}

// `{segments: [{state, start, end}], marks: [{kind, at, event}]}`; the last segment's `end` is 0 while it goes on.
export function timeline(events) {
  const now = { run: false, queued: 0, down: false, call: false, tools: 0, children: 0, person: 0, timers: 0 };
  const segments = [], marks = [];
  const began = () => Object.assign(now, { run: true, call: false, tools: 0, children: 0, person: 0, timers: 0 });
  const changes = {
    run_accepted: () => { now.queued += 1; },
    run_started: () => { now.queued = Math.max(0, now.queued - 1); began(); },
    run_finished: (data) => { if (!data.started_at) now.queued = Math.max(0, now.queued - 1); began(); now.run = false; now.down = false; },
    session_activated: () => { now.down = false; if (now.queued === 0 && !now.run) now.run = "unknown"; },
    session_crashed: (data) => { now.down = !data.waiting; }, // what it waits for goes on without a process
    session_quarantined: () => { now.down = false; now.run = false; },
    model_call_started: () => { now.run = true; now.call = true; now.tools = now.children = 0; },
    model_call_reissued: () => { now.run = true; now.call = true; },
    model_call_completed: (data) => { now.call = false; now.tools = data.tool_calls; },
    model_call_failed: () => { now.call = false; },
    tool_finished: () => { now.tools = Math.max(0, now.tools - 1); },
    child_spawned: () => { now.children += 1; },
    child_finished: () => { now.children = Math.max(0, now.children - 1); },
    input_requested: () => { now.person += 1; },
    input_received: () => { now.person = Math.max(0, now.person - 1); },
    timer_set: (data) => { if (data.kind === "wait") now.timers += 1; },
    timer_fired: (data) => { if (data.kind === "wait") now.timers = Math.max(0, now.timers - 1); },
  };
  for (const event of events) {
    const change = changes[event.type];
    if (change) {
      change(event.data || {});
      if (now.run === "unknown") now.run = false;
      const state = stateOf(now), last = segments.at(-1);
      if (last && !last.end && last.state !== state) last.end = event.at;
      if (state && (!last || last.end)) segments.push({ state, start: event.at, end: 0 });
    }
    if (event.type === "session_activated" && event.data.cause !== "ready") marks.push({ kind: "recover", at: event.at, event });
    else if (MARKS[event.type]) marks.push({ kind: MARKS[event.type], at: event.at, event });
  }
  return { segments: segments.filter((segment) => !segment.end || segment.end > segment.start), marks };
}

// One lane, 1000 units wide; `from` and `to` are times.
export function lane(found, from, to) {
  const scale = (at) => Math.max(0, Math.min(1000, ((at - from) / Math.max(1, to - from)) * 1000));
  const parts = [];
  for (const { state, start, end } of found.segments) {
    const until = end || to;
    if (until < from || start > to) continue;
    const left = scale(start), width = Math.max(1.5, scale(until) - left);
    parts.push(svg("rect", { class: `s-${state}`, x: left.toFixed(1), y: 4, width: width.toFixed(1), height: 12 },
      svg("title", null, `${words(state)} for ${age(until - start)}, from ${clock(start, true)}`)));
  }
  for (const { kind, at, event } of found.marks) {
    if (at < from || at > to) continue;
    const x = scale(at).toFixed(1);
    // A crash and its recovery are milliseconds apart: one takes the upper half, the other the lower one.
    const [y1, y2] = { crash: [0, 10], recover: [10, 20] }[kind] || [0, 20];
    parts.push(svg("line", { class: `m-${kind}`, x1: x, x2: x, y1, y2, "vector-effect": "non-scaling-stroke" },
      svg("title", null, `${words(event.type)} at ${clock(at, true)}`)));
  }
  return svg("svg", { viewBox: "0 0 1000 20", preserveAspectRatio: "none", class: "lane", role: "img",
    "aria-label": `${found.marks.filter((mark) => mark.kind === "crash").length} crashes` }, parts);
}
