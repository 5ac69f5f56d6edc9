// Routes, the header, and logging in.

import { get, post } from "./api.js";
import { h, text } from "./dom.js";
import { fleetView } from "./fleet.js";
import { nodesView } from "./nodes.js";
import { schedulesView } from "./schedules.js";
import { sessionView } from "./session.js";

const main = document.getElementById("main");
const connection = document.getElementById("connection");
let leave = () => {};
let shown = "";
const TITLES = { nodes: "Nodes", schedules: "Schedules and queues" };

const page = {
  me: { may_act: false },
  fleet: "#/", // the first page as it was left
  state(value) {
    text(connection, value);
    connection.className = value;
  },
  refused(error) {
    if (error.status === 401) return start();
    leave();
    leave = () => {};
    shown = "";
    page.state("stopped");
    main.replaceChildren(
      h("section", { class: "panel" },
        h("h1", null, error.status === 404 ? "There is no such session" : "The console refuses this"),
        h("p", null, error.message), h("p", null, h("a", { href: page.fleet }, "All sessions"))));
  },
};

// #/ · #/?FILTER · #/nodes · #/schedules · #/session/ID · #/session/ID/PART · #/session/ID/run/RUN
export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const parts = path.split("/").map((part) => {
    try { return decodeURIComponent(part); } catch { return part; }
  });
  if (Object.hasOwn(TITLES, parts[0])) return { view: parts[0] };
  if (parts[0] !== "session" || !parts[1]) return { view: "fleet", query };
  if (parts[2] === "run" && parts[3]) return { view: "session", session: parts[1], part: "trace", run: parts[3] };
  return { view: "session", session: parts[1], part: parts[2] || "events", run: "" };
}

const VIEWS = {
  session: sessionView, fleet: fleetView, nodes: (place, _wanted, shared) => nodesView(place, shared),
  schedules: (place, _wanted, shared) => schedulesView(place, shared),
};

function route() {
  const wanted = parse(location.hash);
  const name = wanted.session || wanted.view;
  if (wanted.view === "fleet") page.fleet = location.hash || "#/";
  if (shown === name && leave.go) return leave.go(wanted);
  leave();
  main.replaceChildren();
  shown = name;
  const title = wanted.session || TITLES[wanted.view];
  document.title = title ? `${title} · Understudy` : "Understudy";
  for (const part of ["fleet", ...Object.keys(TITLES)]) {
    const element = document.getElementById(`to-${part}`);
    if (wanted.view === part) element.setAttribute("aria-current", "page");
    else element.removeAttribute("aria-current");
  }
  leave = VIEWS[wanted.view](main, wanted, page);
  main.focus({ preventScroll: true });
  window.scrollTo(0, 0);
}

function logIn() {
  leave();
  leave = () => {};
  shown = "";
  const token = h("input", { type: "password", name: "token", autocomplete: "current-password", required: true, autofocus: true });
  const problem = h("p", { class: "problem", role: "alert" });
  const form = h("form", { class: "panel login", onsubmit: async (event) => {
    event.preventDefault();
    try {
      await post("/api/login", { token: token.value });
      token.value = "";
      start();
    } catch (error) {
      text(problem, error.message);
      token.select();
    }
  } }, h("h1", null, "Log in"), h("label", null, "The console's token", token), h("button", { class: "primary" }, "Log in"), problem);
  main.replaceChildren(form);
  token.focus();
}

async function start() {
  try {
    page.me = await get("/api/me");
  } catch (error) {
    page.state("reconnecting");
    setTimeout(start, 2000);
    return;
  }
  text(document.getElementById("namespace"), page.me.namespace === "default" ? "" : page.me.namespace);
  text(document.getElementById("rights"), page.me.locked ? "" : page.me.may_act ? "may act" : "read only");
  document.getElementById("logout").hidden = !page.me.may_act;
  if (page.me.locked) {
    page.state("locked");
    logIn();
  } else route();
}

document.getElementById("logout").addEventListener("click", async () => { await post("/api/logout"); start(); });
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); }); // its address is no page
window.addEventListener("hashchange", () => { if (!page.me.locked) route(); });
window.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, select, dialog") || event.metaKey || event.ctrlKey || event.altKey) return;
  if (event.key === "/") {
    const filter = document.querySelector("input[type=search]");
    if (filter) { event.preventDefault(); filter.focus(); }
  } else if (event.key === "g") location.hash = page.fleet;
  else if (event.key === "n") location.hash = "#/nodes";
  else if (event.key === "s") location.hash = "#/schedules";
  else if (/^[1-9]$/.test(event.key)) document.querySelectorAll("[role=tab]:not([hidden])")[event.key - 1]?.click();
});
start();
