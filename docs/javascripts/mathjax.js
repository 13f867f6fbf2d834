window.MathJax = {
  tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]] },
  options: { ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex" },
};

// Pages loaded without a full reload are typeset again.
window.document$?.subscribe(() => window.MathJax.typesetPromise?.());
