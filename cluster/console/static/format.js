// Numbers and times for people. Times are microseconds since 1970 UTC, as in the API.

export function age(microseconds) {
  const seconds = Math.max(0, microseconds) / 1e6;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  const hours = Math.floor(minutes / 60);
  if (hours >= 48) return `${Math.floor(hours / 24)} d`;
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${Math.floor(seconds) % 60} s`;
}

export function clock(microseconds, precise = false) {
  const date = new Date(microseconds / 1000);
  const two = (number) => String(number).padStart(2, "0");
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return precise ? `${time}.${String(date.getMilliseconds()).padStart(3, "0")}` : time;
}

export function moment(microseconds) {
  const date = new Date(microseconds / 1000);
  const today = new Date().toDateString() === date.toDateString();
  return today ? clock(microseconds) : `${date.toLocaleDateString()} ${clock(microseconds)}`;
}

export function short(number) {
  if (number < 10_000) return String(number);
  return number < 1e6 ? `${(number / 1e3).toFixed(1)}k` : `${(number / 1e6).toFixed(1)}M`;
}

// Amounts of money are millionths of the price table's currency.
export function money(millionths) {
  if (!millionths) return "–";
  const value = millionths / 1e6;
  return value >= 100 ? value.toFixed(0) : value.toFixed(value >= 1 ? 2 : 4);
}

export function bytes(number) {
  return number < 2 ** 30 ? `${Math.round(number / 2 ** 20)} MiB` : `${(number / 2 ** 30).toFixed(1)} GiB`;
}

export function counted(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

export function amount(resource, value) {
  if (resource === "cost") return money(value);
  return resource === "seconds" ? age(value) : value.toLocaleString("en");
}

export function words(status) {
  return String(status).replaceAll("_", " ");
}

export function brief(id) {
  return id.length > 14 ? `${id.slice(0, 6)}…${id.slice(-6)}` : id;
}

export function plain(content) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  return content.map((part) => (typeof part.text === "string" ? part.text : JSON.stringify(part).slice(0, 2000))).join("\n");
}

// What colours an event: a run's end by how it ended.
export function kind(event) {
  return event.type === "run_finished" && event.data.status !== "completed" ? event.data.status : event.type;
}

// One line of what an event says, without its envelope.
export function summary(event) {
  const data = event.data || {};
  const lines = {
    session_crashed: () => `${words(data.cause)}, pid ${data.pid}${data.waiting ? ", while it waited" : ""} → ${data.decision}`,
    session_activated: () => `${data.cause}, pid ${data.pid}${data.down ? `, ${age(data.down)} after the crash` : ""}`,
    session_quarantined: () => words(data.reason),
    session_moved: () => `from ${data.from_node.slice(0, 8)} to ${data.to_node.slice(0, 8)}`,
    run_admitted: () => `a slot in ${data.queue} after ${age(data.waited)}`,
    run_started: () => `after ${age(data.queued)} in the queue`,
    run_accepted: () => `from ${data.source}`,
    session_created: () => (data.restart ? `start ${data.restart + 1} of its task` : ""),
    run_finished: () => `${words(data.status)}, ${counted(data.rounds, "round")}${data.error_message ? `: ${data.error_message}` : ""}`,
    model_call_started: () => `${data.model}${data.attempt > 1 ? `, attempt ${data.attempt}` : ""}`,
    model_call_completed: () =>
      `${data.model}, ${age(data.duration)}, ${(data.usage || [0, 0])[0]} + ${(data.usage || [0, 0])[1]} tokens` +
      (data.tool_calls ? `, ${counted(data.tool_calls, "tool call")}` : "") + (data.redone ? ", paid a second time" : ""),
    model_call_failed: () => `${data.error_code}: ${data.error_message}`,
    tool_started: () => data.tool,
    tool_progress: () => `${data.tool}${data.fraction === null ? "" : ` ${Math.round(data.fraction * 100)} %`}${data.text ? ` ${data.text}` : ""}`,
    custom: () => `${data.tool}: ${data.name} ${JSON.stringify(data.data)}`,
    tool_finished: () => `${data.tool} ${data.outcome}, ${age(data.duration)}${data.error_message ? `: ${data.error_message}` : ""}`,
    tool_in_doubt: () => `${data.tool}: ${data.policy}`,
    mcp_server_listed: () => `${data.server}: ${counted((data.tools || []).length, "tool")}`,
    mcp_server_failed: () => `${data.server}: ${data.error_message}`,
    worktree_ended: () => `${data.branch} ${data.outcome}${(data.files || []).length ? `: ${data.files.join(", ")}` : ""}`,
    input_requested: () => data.prompt,
    agent_handed_off: () => `${data.from_agent} → ${data.to_agent}${data.reason ? `: ${data.reason}` : ""}`,
    command_started: () => `${data.job}${data.name ? ` ${data.name}` : ""}`,
    command_ended: () => `${data.job} ${data.state}${data.exit_code === null ? "" : ` (${data.exit_code})`}, ${age(data.duration)}`,
    child_spawned: () => `${data.child_agent} ${data.child_id}`,
    child_finished: () => `${data.child_id} ${words(data.status)}`,
    cancel_requested: () => data.reason,
    service_restarted: () => `node ${data.node_id.slice(0, 8)}, pid ${data.old_pid} → ${data.pid}`,
    service_lost: () => `node ${data.node_id.slice(0, 8)}, pid ${data.old_pid}`,
  };
  const by = data.by ? `by ${data.by}` : "";
  if (lines[event.type]) return [lines[event.type](), by].filter(Boolean).join(", ");
  return Object.entries(data).filter(([, value]) => value !== null && value !== "" && value !== 0 && value !== false)
    .map(([name, value]) => `${name}=${typeof value === "object" ? JSON.stringify(value) : value}`).join(" ");
}
