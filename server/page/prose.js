// Text of a model as paragraphs and fenced code blocks, built while it comes: what is shown is never built again.

import { copyButton, element } from "./dom.js";

const FENCE = /^ {0,3}(`{3,})([^`]*)$/;
const MAY_BE_FENCE = /^ {0,3}(`{0,2}$|`{3})/;

export class Prose {
  #target;
  /** The text node of the block that is being written; null between blocks. */
  #block = null;
  /** The opening marks of the code block that is being written; empty: a paragraph. */
  #fence = "";
  /** The line that has not ended, and how much of it is shown. */
  #line = "";
  #shown = 0;
  /** Whether a line break comes before the next text of the block. */
  #break = false;

  constructor(target) {
    this.#target = target;
  }

  add(text) {
    const lines = text.split("\n");
    lines.forEach((part, index) => {
      this.#line += part;
      if (index < lines.length - 1) this.#endLine();
    });
    if (this.#shown || !MAY_BE_FENCE.test(this.#line)) this.#show();
  }

  /** Shows what was held back, since it might have begun or ended a code block. */
  end() {
    if (this.#line) this.#endLine();
  }

  #endLine() {
    const fence = this.#shown ? null : FENCE.exec(this.#line);
    if (this.#fence) {
      if (fence && fence[1].length >= this.#fence.length && !fence[2].trim()) this.#endBlock();
      else this.#finishLine();
    } else if (fence) {
      this.#endBlock();
      this.#beginCode(fence[1], fence[2].trim());
    } else if (this.#line.trim()) {
      this.#finishLine();
    } else {
      this.#endBlock();
    }
    this.#line = "";
    this.#shown = 0;
  }

  #finishLine() {
    this.#show();
    this.#break = true;
  }

  #show() {
    if (!this.#block) this.#beginParagraph();
    if (this.#break) this.#block.appendData("\n");
    this.#break = false;
    this.#block.appendData(this.#line.slice(this.#shown));
    this.#shown = this.#line.length;
  }

  #beginParagraph() {
    this.#block = document.createTextNode("");
    this.#target.append(element("p", { dir: "auto" }, this.#block));
  }

  #beginCode(fence, language) {
    const text = (this.#block = document.createTextNode(""));
    this.#fence = fence;
    const bar = element("div", { class: "bar" }, element("span", {}, language));
    const copy = copyButton(() => text.data);
    if (copy) bar.append(copy);
    this.#target.append(element("div", { class: "block" }, bar, element("pre", { tabindex: "0" }, element("code", {}, text))));
  }

  #endBlock() {
    this.#block = null;
    this.#fence = "";
    this.#break = false;
  }
}
