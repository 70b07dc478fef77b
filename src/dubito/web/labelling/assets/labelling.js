"use strict";
(() => {
  const {classes, keys} = SETTINGS, base = location.pathname;
  const part = id => document.getElementById(id);
  let state = null, sending = false, guessing = false, over = false, shown = null;

  function make(name, attributes = {}, ...children) {
    const found = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
    found.append(...children);
    return found;
  }
  const percent = value => value === undefined || value === null ? "–" : (100 * value).toFixed(1) + " %";

  // -- talking to the server

  async function talk(path, body) {
    const options = body === undefined ? {} :
      {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body)};
    let answer, found;
    try {
      answer = await fetch(base + path, options);
      found = await answer.json();  // the server may also stop in the middle of an answer
    } catch {
      if (!over) trouble("The server has stopped. All answers are saved: run the command again to continue.");
      return false;
    }
    if (!answer.ok) { trouble("Not saved: " + found.refused); return false; }
    if (!state || found.version >= state.version) state = found;
    trouble(found.error ? "The model could not be fitted (" + found.error + "). You can go on labelling; it will be tried again." : "");
    draw();
    return true;
  }
  function trouble(words) { part("trouble").textContent = words; part("trouble").hidden = !words; }
  function say(words) { part("said").textContent = words; }

  async function send(path, body, words) {
    if (sending || over) return;
    sending = true;
    try { if (await talk(path, body)) say(words); } finally { sending = false; }
  }
  const current = () => state && state.asked[0];
  function label(c) { const one = current(); if (one) send("label", {index: one.index, label: c}, "Saved: " + classes[c]); }
  function skip() { const one = current(); if (one) send("skip", {index: one.index}, "Skipped: it will not be asked again"); }
  function undo(index) { if (state && state.undoable) send("undo", index === undefined ? {} : {index}, "Taken back: choose a class"); }
  async function stop() {
    await send("stop", {}, "");
    if (!state || !state.stopped) return;
    over = true;
    for (const button of document.querySelectorAll("button")) button.disabled = true;
    part("busy").textContent = "stopped";
    say("Stopped. All answers are saved: run the command again to continue.");
  }
  function guess() {
    guessing = !guessing;
    part("guess").setAttribute("aria-pressed", guessing);
    part("guess").lastChild.textContent = guessing ? " hide the model's guess" : " show the model's guess";
    if (state) draw();
  }

  // -- keys and buttons

  classes.forEach((name, c) => {
    const button = make("button", {title: name, "data-class": c}, make("span", {class: "guess"}));
    if (keys[c]) button.append(make("kbd", {}, keys[c]));
    button.append(make("span", {class: "name"}, name), make("span", {class: "count"}));
    button.disabled = true;  // until there is something to label
    button.addEventListener("click", () => { label(c); button.blur(); });
    part("classes").append(button);
  });
  for (const [id, act] of [["skip", skip], ["undo", () => undo()], ["guess", guess], ["stop", stop]])
    part(id).addEventListener("click", () => { act(); part(id).blur(); });
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.repeat) return;
    if (document.activeElement.tagName === "BUTTON" && (event.key === "Enter" || event.key === " ")) return;  // the button is pressed
    const c = keys.indexOf(event.key.toLowerCase());
    if (c >= 0 && event.key) label(c);
    else if (event.key === " ") skip();
    else if (event.key === "Backspace") undo();
    else if (event.key === "/") guess();
    else if (event.key === "Escape") stop();
    else return;
    event.preventDefault();
  });

  // -- drawing

  function content(one, small) {
    if (one.kind === "image") {
      const alt = "input " + one.index;
      const tiny = Math.max(one.width, one.height) < 16;  // a few pixels are easier to read blurred
      return make("img", {src: base + "input/" + one.index + (small ? "/small" : ""), alt, class: tiny ? "tiny" : ""});
    }
    if (one.kind === "text") return small ? make("span", {class: "words"}, one.text) : make("blockquote", {}, one.text);
    if (small) return make("span", {class: "words"}, one.cells.map(cell => cell.join(" ")).join(", "));
    const body = make("tbody");
    for (const [name, value] of one.cells)
      body.append(make("tr", {}, make("th", {class: "word", scope: "row"}, name), make("td", {}, value)));
    return make("table", {}, body);
  }

  function draw() {
    const one = current(), last = state.rounds[state.rounds.length - 1];
    part("progress").textContent = state.labelled + " of " + state.pool + " labelled" +
      (state.skipped ? ", " + state.skipped + " skipped" : "");
    part("busy").textContent = {fitting: "fitting the model …", asking: "choosing inputs …"}[state.busy] || "";
    const key = one ? one.index : state.done ? "done" : "waiting";
    if (key !== shown) {
      const words = state.done ? "All inputs are labelled or skipped." : "Choosing the next inputs …";
      part("input").replaceChildren(one ? content(one) : make("p", {class: "note"}, words));
      shown = key;
    }
    for (const next of state.asked.slice(1)) if (next.kind === "image") new Image().src = base + "input/" + next.index;
    for (const button of part("classes").children) {
      const c = Number(button.dataset.class), p = guessing && one && one.guess ? one.guess[c] : 0;
      button.disabled = !one || over;
      button.querySelector(".guess").style.width = (100 * p).toFixed(1) + "%";
      button.querySelector(".count").textContent = guessing && one && one.guess ? Math.round(100 * p) + " %" : state.counts[c];
    }
    part("skip").disabled = !one || over;
    part("undo").disabled = !state.undoable || over;

    const [right, of] = state.agreement;
    const numbers = [
      ["labels", state.labelled],
      state.held_out ? ["accuracy on " + state.held_out + " held-out inputs", percent(last && last.held_out.accuracy)]
        : ["accuracy", "no held-out inputs"],
      ["model agreed, last " + (of || 50), of ? percent(right / of) : "–"],
    ];
    part("numbers").replaceChildren(...numbers.map(([name, value]) =>
      make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))));

    const charts = [];
    const held = state.rounds.filter(round => "accuracy" in round.held_out);
    if (state.held_out)
      charts.push(chart("Accuracy on held-out inputs", held.map(round => [round.labels, round.held_out.accuracy]), 1, percent));
    const nats = value => value.toFixed(3);
    const pool = state.rounds.filter(round => "epistemic" in round.pool);
    charts.push(chart("Mean uncertainty of the unlabelled pool (nats): total and epistemic",
      pool.map(round => [round.labels, round.pool.total, round.pool.epistemic]), Math.log(classes.length), nats, ["total ", "epistemic "]));
    part("charts").replaceChildren(...charts);

    part("recent").replaceChildren(...state.recent.map(past => {
      const name = past.label === null ? "skipped" : classes[past.label];
      const button = make("button", {title: "Ask again: " + name}, content(past, true), make("span", {class: "name"}, name));
      button.disabled = over;
      button.addEventListener("click", () => undo(past.index));
      return make("li", {}, button);
    }));
  }

  function chart(title, points, top, words, names = [""]) {
    const NS = "http://www.w3.org/2000/svg", W = 340, H = 130, left = 34, bottom = 18, space = {top: 8, right: 84};
    const draw = (name, attributes, text) => {
      const found = document.createElementNS(NS, name);
      for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
      if (text !== undefined) found.textContent = text;
      return found;
    };
    const most = points.length ? Math.max(...points.map(p => p[0])) : 1;
    const x = n => left + (W - left - space.right) * n / most, y = v => H - bottom - (H - bottom - space.top) * Math.min(v, top) / top;
    const told = points.length ? title + ": " + points.map(p => p[0] + " labels, " + p.slice(1).map(words).join(" and ")).join("; ")
      : title + ": nothing yet";
    const svg = draw("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": told});
    for (const share of [0, 0.5, 1]) {
      svg.append(draw("line", {x1: left, x2: W - space.right, y1: y(share * top), y2: y(share * top), stroke: "var(--line)"}));
      svg.append(draw("text", {x: left - 5, y: y(share * top) + 3, "text-anchor": "end"}, (share * top).toFixed(top === 1 ? 1 : 2)));
    }
    svg.append(draw("text", {x: left, y: H - 4}, "0"), draw("text", {x: x(most), y: H - 4, "text-anchor": "end"}, most + " labels"));
    const lines = points.length ? points[0].length - 1 : 0;
    for (let i = 1; i <= lines; i++) {
      const colour = lines > 1 && i === 1 ? "var(--edge)" : "var(--link)";
      const path = points.map(p => x(p[0]) + "," + y(p[i])).join(" ");
      svg.append(draw("polyline", {points: path, fill: "none", stroke: colour, "stroke-width": 2}));
      for (const p of points) svg.append(draw("circle", {cx: x(p[0]), cy: y(p[i]), r: 2.2, fill: colour}));
      const end = points[points.length - 1];
      svg.append(draw("text", {x: x(end[0]) + 5, y: y(end[i]) + 3}, names[i - 1] + words(end[i])));
    }
    return make("figure", {}, make("figcaption", {}, title), svg);
  }

  async function follow() {
    if (!over && !sending && !document.hidden) await talk("state");
    setTimeout(follow, over ? 1e6 : state && state.busy ? 300 : 1000);
  }
  follow();
})();
