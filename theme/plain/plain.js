// What the plain build needs beside the book's own script: copy buttons, tabs, the contents menu.
{
  const COPY = '<svg viewBox="0 0 16 16" aria-hidden="true"><path d="M5 1h8a2 2 0 0 1 2 2v8h-1.5V3a.5.5 0 0 0-.5-.5H5Zm-2 3h7a2 2 0 0 1 2 2v7a2 2 0 0 1-2 2H3a2 2 0 0 1-2-2V6a2 2 0 0 1 2-2Zm0 1.5a.5.5 0 0 0-.5.5v7a.5.5 0 0 0 .5.5h7a.5.5 0 0 0 .5-.5V6a.5.5 0 0 0-.5-.5Z"/></svg>';
  const DONE = '<svg viewBox="0 0 16 16" aria-hidden="true"><path d="M6.2 12.6 1.9 8.3l1.1-1.1 3.2 3.2 6.8-6.8 1.1 1.1Z"/></svg>';

  const codeOf = (pre) => {
    const code = pre.querySelector("code").cloneNode(true);
    for (const mark of code.querySelectorAll(".code-annotation-diff")) mark.remove();
    return code.textContent;
  };

  const addCopyButton = (pre) => {
    const button = document.createElement("button");
    const invitation = pre.closest(".diff") ? "Copy the whole new file" : pre.closest("[data-before]") ? "Copy the code and what it needs" : "Copy the code";
    const name = (text, icon) => {
      button.innerHTML = icon;
      button.title = text;
      button.setAttribute("aria-label", text);
    };
    button.type = "button";
    button.className = "code-copy-button";
    name(invitation, COPY);
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(codeOf(pre));
        name("Copied", DONE);
      } catch {
        name("The browser did not allow copying", COPY);
      }
      setTimeout(() => name(invitation, COPY), 2000);
    });
    pre.append(button);
  };

  const setUpTabs = (tablist) => {
    const tabs = [...tablist.querySelectorAll("[role=tab]")];
    const panel = (tab) => document.getElementById(tab.getAttribute("aria-controls"));
    const select = (chosen) => {
      for (const tab of tabs) {
        tab.setAttribute("aria-selected", String(tab === chosen));
        tab.tabIndex = tab === chosen ? 0 : -1;
        panel(tab).dataset.title = tab.textContent.trim();
        panel(tab).hidden = tab !== chosen;
      }
      dispatchEvent(new Event("resize")); // what was hidden has a size now
    };
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    tablist.addEventListener("click", (event) => {
      const tab = event.target.closest("[role=tab]");
      if (tab) select(tab);
    });
    tablist.addEventListener("keydown", (event) => {
      const step = steps[event.key];
      if (step === undefined) return;
      event.preventDefault();
      const next = tabs.indexOf(document.activeElement) + step;
      const wrapped = Number.isFinite(next) ? (next + tabs.length) % tabs.length : next > 0 ? tabs.length - 1 : 0;
      select(tabs[wrapped]);
      tabs[wrapped].focus();
    });
    select(tabs[0]);
  };

  // A link to something inside a tab that is not shown, or inside a folded answer.
  const reveal = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const hidden = target && target.closest(".tab-pane[hidden]");
    if (hidden) document.getElementById(hidden.getAttribute("aria-labelledby")).click();
    if (hidden) target.scrollIntoView();
  };

  const setUpMenu = (button) => {
    const menu = document.getElementById(button.getAttribute("aria-controls"));
    const show = (open) => {
      button.setAttribute("aria-expanded", String(open));
      menu.classList.toggle("open", open);
    };
    button.addEventListener("click", () => show(button.getAttribute("aria-expanded") === "false"));
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || button.getAttribute("aria-expanded") === "false") return;
      show(false);
      button.focus();
    });
  };

  document.querySelectorAll("pre.sourceCode").forEach(addCopyButton);
  document.querySelectorAll("[role=tablist]").forEach(setUpTabs);
  document.querySelectorAll(".nav-toggle").forEach(setUpMenu);
  addEventListener("hashchange", reveal);
  reveal();
}
