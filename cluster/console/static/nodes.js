// The nodes: their processes, the sessions with work that are there, and whether they are drained.

import { post } from "./api.js";
import { ask, h, show, sync, text } from "./dom.js";
import { bytes, moment, words } from "./format.js";
import { polling } from "./polling.js";
import { stacked } from "./rows.js";

const HEADS = ["Node", "State", "Services", "Session actors", "Memory", "Ready sessions", "Sessions in a process", "Waiting without one", "What they do", ""];

export function nodesView(main, page) {
  const trouble = h("div"), none = h("p", { class: "quiet" });
  const { body, element: nodes, row } = stacked("Nodes", HEADS);
  main.append(h("h1", null, "Nodes"), trouble, h("section", { class: "panel" }, nodes), none);
  const { look, leave } = polling("/api/nodes", page, trouble, (answer) => {
    const found = nodesOf(answer);
    text(none, found.length ? "" : "No node has a service.");
    sync(body, found, (node) => node.id, row, (element, node) => updateNode(element, node, page.me.may_act, change));
  });

  async function change(node) {
    const back = node.drain;
    const entered = back ?
      await ask(`Take the drain of ${node.id.slice(0, 8)} back?`, "The node gets sessions again. Those that have moved stay where they are.", "Take it back") :
      await ask(`Drain ${node.id.slice(0, 8)}?`, `Its sessions with work (${node.held + node.waiting}) finish what they are at and go on at other nodes; this one gets no new ones. What is left at the end of the time moves the hard way.`,
        "Drain", [["seconds", "Seconds that they have", "600"]]);
    if (!entered) return;
    try {
      await post(`/api/nodes/${encodeURIComponent(node.id)}/${back ? "undrain" : "drain"}`, back ? {} : { seconds: Number(entered.seconds) });
    } catch (error) {
      await ask("That did not work", `${error.message} ${error.hint || ""}`, "Understood");
    }
    look();
  }

  return leave;
}

export function nodesOf({ services, sessions, drains, loads }) {
  const found = new Map();
  const at = (id) => {
    if (!found.has(id)) found.set(id, { id, services: [], frames: 0, standby: 0, held: 0, waiting: 0, statuses: new Map(), drain: null, load: loads[id] });
    return found.get(id);
  };
  for (const service of services) {
    const node = at(service.node_id);
    if (service.role === "frame") node.frames += 1;
    else if (service.role === "standby") node.standby += 1;
    else node.services.push(service);
  }
  for (const { node_id, status, held, sessions: count } of sessions) {
    const node = at(node_id);
    node[held ? "held" : "waiting"] += count;
    node.statuses.set(status, (node.statuses.get(status) || 0) + count);
  }
  for (const drain of drains) at(drain.node_id).drain = drain;
  return [...found.values()].sort((a, b) => (a.id < b.id ? -1 : 1));
}

function state({ services, drain }) {
  if (drain) return drain.finished_at ? ["drained", `since ${moment(drain.finished_at)}`] : ["draining", `${drain.left} left, until ${moment(drain.deadline)}`];
  return services.some((service) => service.role === "node") ? ["in use", ""] : ["no service", ""];
}

function updateNode(element, node, mayAct, change) {
  const [id, now, services, actors, memory, ready, held, waiting, doing, action] = element.children;
  const [word, more] = state(node);
  text(id, node.id.slice(0, 12) || "no node yet");
  id.title = node.id;
  show(now, h("span", { class: `pill ${{ "in use": "completed", "no service": "failed" }[word] || "waiting_for_input"}` }, word), more ? h("div", { class: "quiet" }, more) : "");
  text(services, node.services.map((service) => `${words(service.role)} ${service.pid}`).join(", ") || "–");
  const { load } = node;
  show(actors, ...(load ? [`${load.acting} at work, ${load.waiting} ${load.waiting === 1 ? "waits" : "wait"}, ${load.standby} standing by`, h("div", { class: "quiet" }, load.cap ? `at most ${load.cap}` : "no bound yet")]
    : [`${node.frames} at work, ${node.standby} standing by`]));
  show(memory, ...(load?.memory_total ? [`${bytes(load.memory_free)} of ${bytes(load.memory_total)} free`, h("div", { class: "quiet" }, load.memory_actor ? `an actor takes ${bytes(load.memory_actor)}` : "")] : ["–"]));
  [[ready, load ? load.ready : "–"], [held, node.held], [waiting, node.waiting]].forEach(([cell, value]) => text(cell, value));
  text(doing, [...node.statuses].map(([status, count]) => `${count} ${words(status)}`).join(", ") || "–");
  element.node_ = node;
  if (!mayAct || !node.id) return action.replaceChildren();
  if (!action.firstChild) action.append(h("button", { onclick: () => change(element.node_) }));
  text(action.firstChild, node.drain ? "Undrain" : "Drain …");
}
