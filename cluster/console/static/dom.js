// Building the page. Text only ever becomes text: nothing here takes markup, so what a model says can't become any.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function h(name, properties, ...children) {
  return fill(document.createElement(name), properties, children);
}

export function svg(name, properties, ...children) {
  return fill(document.createElementNS(SVG, name), properties, children);
}

// Replace what an element has, unless it would be the same: selection and scrolling stay where nothing changed. Not for what
// has listeners: those of the elements that stay are the old ones.
export function show(element, ...children) {
  const made = h("div", null, ...children);
  if (made.innerHTML !== element.innerHTML) element.replaceChildren(...made.childNodes);
}

// Keep one element for each item, in the items' order. `make` builds it, `update` brings it up to date.
export function sync(parent, items, key, make, update) {
  const known = parent.known || (parent.known = new Map());
  const kept = new Set();
  let place = parent.firstChild;
  for (const item of items) {
    const name = key(item);
    let element = known.get(name);
    if (!element) known.set(name, (element = make(item)));
    update(element, item);
    kept.add(name);
    if (element === place) place = place.nextSibling;
    else parent.insertBefore(element, place);
  }
  for (const [name, element] of known) {
    if (!kept.has(name)) {
      element.remove();
      known.delete(name);
    }
  }
}

export function text(element, value) {
  const shown = String(value);
  if (element.textContent !== shown) element.textContent = shown;
}

// A question with buttons: `fields` are [name, label, value, rows]. Gives what was entered, or null.
export function ask(title, explanation, verb, fields = []) {
  const dialog = document.getElementById("dialog");
  return new Promise((resolve) => {
    const inputs = fields.map(([name, label, value, rows]) =>
      h("label", null, label, rows > 1 ? h("textarea", { name, rows, value }) : h("input", { name, value, autocomplete: "off" })));
    const form = h("form", { method: "dialog" },
      h("h2", null, title), h("p", null, explanation), inputs,
      h("div", { class: "buttons" },
        h("button", { type: "button", onclick: () => dialog.close("") }, "Leave it"),
        h("button", { class: "primary", value: "yes" }, verb)));
    dialog.replaceChildren(form);
    dialog.onclose = () => {
      const entered = Object.fromEntries(new FormData(form));
      dialog.replaceChildren();
      resolve(dialog.returnValue === "yes" ? entered : null);
    };
    dialog.returnValue = "";
    dialog.showModal();
  });
}

// Arrow keys move between the rows of a list.
export function rowKeys(list, selector) {
  list.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const rows = [...list.querySelectorAll(selector)];
    const at = rows.indexOf(document.activeElement);
    if (!step || at < 0) return;
    event.preventDefault();
    rows[Math.max(0, Math.min(rows.length - 1, at + step))].focus();
  });
}
