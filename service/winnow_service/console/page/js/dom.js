/** Making elements. Text only ever becomes a text node: nothing that a server or a user wrote is parsed as HTML. */

/**
 * An element.
 *
 * @param properties attributes; true for one without a value, false or null for none; `onclick` and the like are listeners.
 * @param children elements and texts; null and false are left out.
 */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...shown(children));
  return element;
}

/** Put `children` in place of what is in `element`. */
export function fill(element, ...children) {
  element.replaceChildren(...shown(children));
}

function shown(children) {
  return children.flat().filter((child) => child !== null && child !== undefined && child !== false);
}

let ids = 0;

/** An id that no other element has. */
export function newId(what) {
  ids += 1;
  return `${what}-${ids}`;
}

/** Tell screen readers, once, what has happened elsewhere than where the focus is. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}
