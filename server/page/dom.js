// Making elements. Text is always a text node: nothing that a model writes can become markup.

/** An element with attributes and children; a child that is a string becomes a text node. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "boolean") made.toggleAttribute(key, value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** A button that calls `act`. */
export function button(label, act, attributes = {}) {
  const made = element("button", { type: "button", ...attributes }, label);
  made.addEventListener("click", act);
  return made;
}

/** A button that copies the text that `read` returns; null where the browser lets no page copy. */
export function copyButton(read, label = "Copy") {
  if (!navigator.clipboard) return null;
  const made = button(label, async () => {
    try {
      await navigator.clipboard.writeText(read());
      made.textContent = "Copied";
    } catch {
      made.textContent = "Not allowed";
    }
    setTimeout(() => (made.textContent = label), 1500);
  }, { class: "link" });
  return made;
}
