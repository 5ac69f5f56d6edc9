// A trace as a waterfall: spans below their parents, on one axis of time.

import { h } from "./dom.js";
import { age, clock } from "./format.js";

// Spans in the order of the tree, each with its `depth`; those whose parent is not among them are on top.
export function inOrder(spans) {
  const known = new Map(spans.map((span) => [span.span_id, span]));
  const below = new Map();
  const tops = [];
  for (const span of spans) {
    if (!known.has(span.parent_span_id)) tops.push(span);
    else below.set(span.parent_span_id, [...(below.get(span.parent_span_id) || []), span]);
  }
  const ordered = [];
  const waiting = tops.reverse().map((span) => [span, 0]);
  while (waiting.length) {
    const [span, depth] = waiting.pop();
    ordered.push({ ...span, depth });
    for (const child of (below.get(span.span_id) || []).reverse()) waiting.push([child, depth + 1]);
  }
  return ordered;
}

function attributes(span) {
  const rows = [["span", span.span_id], ["session", span.session_id], ["run", span.run_id], ...(span.error ? [["error", span.error]] : []),
    ...(span.links.length ? [["links", span.links.join(", ")]] : []), ...Object.entries(span.attributes)];
  return h("dl", null, rows.map(([name, value]) => [h("dt", null, name), h("dd", null, typeof value === "object" ? JSON.stringify(value) : String(value))]));
}

// `opened` keeps the ids of spans whose attributes are shown.
export function waterfall(spans, opened, changed) {
  if (!spans.length) return h("p", { class: "quiet" }, "No spans.");
  const now = Date.now() * 1000;
  const from = Math.min(...spans.map((span) => span.start));
  const to = Math.max(from + 1, ...spans.map((span) => span.end || Math.max(now, span.start)));
  const percent = (at) => (100 * (at - from)) / (to - from);
  const rows = inOrder(spans).map((span) => {
    const end = span.end || to;
    const left = percent(span.start), width = Math.max(0.15, percent(end) - left);
    const bar = h("span", { class: `bar ${span.operation} ${span.status}` });
    bar.style.left = `${Math.min(left, 99.6)}%`;
    bar.style.width = `${Math.min(width, 100 - Math.min(left, 99.6))}%`;
    const name = h("span", { class: "name", title: span.name }, span.name);
    name.style.paddingLeft = `${Math.min(span.depth, 12) * 0.9}rem`;
    const open = opened.has(span.span_id);
    return h("li", { class: span.status },
      h("button", { class: "span", "aria-expanded": String(open), onclick: () => {
        if (!opened.delete(span.span_id)) opened.add(span.span_id);
        changed();
      } }, name, h("span", { class: "track" }, bar), h("span", { class: "took" }, span.status === "open" ? "…" : age(end - span.start))),
      open ? attributes(span) : null);
  });
  return h("div", null,
    h("div", { class: "axis waterfall-axis quiet" }, h("span", null, clock(from, true)), h("span", null, `${spans.length} spans, ${age(to - from)}`), h("span", null, clock(to, true))),
    h("ol", { class: "waterfall" }, rows));
}
