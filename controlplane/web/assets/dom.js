// The page's elements, changed in place: focus and selection stay, and screen readers hear only what changed.

export const byId = (id) => document.getElementById(id);

/** Set an element's text, if it is another. */
export function say(element, text) {
  const wanted = String(text ?? "");
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** Set or remove an attribute, if it is another. */
export function mark(element, name, value) {
  if (value === null || value === undefined || value === "") element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

/**
 * Make `parent` have one child for each item, in order: those of known keys are kept and filled anew.
 * `create` makes an empty child, `fill(child, item)` writes into it.
 */
export function keyed(parent, items, keyOf, create, fill) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = known.get(key);
    if (child === undefined) {
      child = create(item);
      child.dataset.key = key;
    }
    known.delete(key);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    fill(child, item);
  }
  for (const child of known.values()) child.remove();
}

/** A table row with a row header and so many cells. */
export function row(cells, classes = []) {
  const made = make("tr");
  for (let i = 0; i < cells; i += 1) {
    const cell = make(i === 0 ? "th" : "td", classes[i] ?? "");
    if (i === 0) cell.scope = "row";
    made.append(cell);
  }
  return made;
}
