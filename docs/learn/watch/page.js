// The page: settings, the address, stepping and playing, and what is told about the step that was just done.
"use strict";

tilewise.page = (() => {
  const { story, Run, at } = tilewise;
  const { labels, say, words } = story;
  const element = (id) => document.getElementById(id);
  /** Change a text only where it differs: what stays as it is needs no layout and no drawing. */
  const write = (where, text) => where.textContent !== text && (where.textContent = text);
  const form = element("settings");

  const CHOICES = { d: [2, 4, 8, 16], br: [2, 3, 4, 6, 8, 12, 16, 24, 32, 64], bc: [2, 3, 4, 6, 8, 12, 16, 24, 32, 64] };
  const FIRST = { pass: "forward", causal: false, n: 16, d: 4, br: 4, bc: 4, seed: 1 };
  const CLOSE = 1e-12; // 64-bit numbers, at most 64 of them in a sum

  let settings = { ...FIRST };
  let run, truth, most, watched = Infinity, playing = null;
  const figure = new tilewise.Figure(element("figure"));

  // Settings and the address

  /** Settings from anything: what is missing or not allowed becomes what it was. */
  function allowed(wanted) {
    const next = { ...settings };
    const whole = (text, low, high) => {
      const value = Number(text);
      return Number.isInteger(value) && low <= value && value <= high && text !== "";
    };
    if (wanted.pass === "forward" || wanted.pass === "backward") next.pass = wanted.pass;
    if (wanted.causal !== undefined) next.causal = ["1", "true"].includes(String(wanted.causal));
    if (whole(wanted.n, 8, 64)) next.n = Number(wanted.n);
    if (whole(wanted.seed, 0, 9999)) next.seed = Number(wanted.seed);
    for (const [name, choices] of Object.entries(CHOICES))
      if (choices.includes(Number(wanted[name]))) next[name] = Number(wanted[name]);
    return next;
  }

  function address() {
    const { causal, ...others } = settings;
    return `#${new URLSearchParams({ ...others, causal: Number(causal), step: run.position })}`;
  }

  let due = 0;
  /** The address follows when the steps pause: browsers refuse to change it sixty times a second. */
  function remember() {
    clearTimeout(due);
    due = setTimeout(() => history.replaceState(null, "", address()), 250);
  }

  function fillForm() {
    const { pass, causal, ...others } = settings;
    for (const [name, value] of Object.entries(others)) form.elements[name].value = value;
    form.elements.pass.value = pass;
    form.elements.causal.checked = causal;
    element("length").value = settings.n;
  }

  /** New settings, a new run, at the given step. */
  function set(wanted, step = 0) {
    pause();
    settings = allowed(wanted);
    const { pass, causal, n, d, br, bc, seed } = settings;
    const given = tilewise.inputs(n, d, seed);
    run = tilewise.run(given, { B_r: br, B_c: bc, causal, backward: pass === "backward" });
    truth = tilewise.direct(given, causal);
    most = Math.max(...run.steps.map(Run.held));
    watched = Infinity;
    fillForm();
    listLines();
    headTable();
    element("position").max = run.steps.length;
    figure.show(run);
    go(step);
  }

  // Steps

  function go(position) {
    run.seek(position);
    figure.draw();
    tell();
    remember();
  }

  /** To the next or last step that has the same line as a tile's first. */
  function goTile(direction) {
    let position = run.position + direction;
    while (position > 0 && position < run.steps.length && run.steps[position - 1].line !== "load") position += direction;
    go(position);
  }

  function play() {
    if (playing) return;
    if (run.position === run.steps.length) go(0);
    playing = { since: performance.now(), done: 0 };
    showPlaying();
    requestAnimationFrame(frame);
  }

  function pause() {
    playing = null;
    showPlaying();
  }

  /** At most one drawing a frame, however many steps are due. */
  function frame(now) {
    if (!playing) return;
    const due = Math.floor(((now - playing.since) * Number(element("speed").value)) / 1000 + 0.5);
    if (due > playing.done) {
      go(run.position + Math.min(due - playing.done, 4)); // after a pause of the browser do not jump
      playing.done = due;
    }
    if (run.position === run.steps.length) pause();
    else requestAnimationFrame(frame);
  }

  function showPlaying() {
    const button = element("play");
    button.setAttribute("aria-pressed", String(playing !== null));
    button.title = say(playing ? words.pause : words.play);
    button.setAttribute("aria-label", button.title);
    element("told").setAttribute("aria-live", playing ? "off" : "polite");
  }

  // What is told

  const lines = () => story[settings.pass];

  function listLines() {
    element("lines").innerHTML = lines()
      .map(({ depth, code, why }) => `<li data-depth="${depth}" class="${why ? "line" : "loop"}">${say(code)}</li>`)
      .join("");
  }

  function tell() {
    const step = run.current;
    const index = lines().findIndex((line) => line.id === step?.line);
    [...element("lines").children].forEach((item, k) => {
      if (k === index) item.setAttribute("aria-current", "step");
      else item.removeAttribute("aria-current");
    });
    const rows = rowsNow();
    const line = lines()[index];
    write(element("told"), say(line ? line.tell(step, run.values, rows.watched) : story.before[settings.pass]));
    element("why").innerHTML = say(line ? line.why : words.begin);
    element("position").value = run.position;
    element("count").value = `${run.position} / ${run.steps.length}`;
    figure.canvas.setAttribute("aria-label", `${say(words.heatMaps)} ${element("told").textContent}`);
    tellRows(rows);
    tellTraffic(step);
    tellErrors();
  }

  /** The tile of rows that the last steps were about, and which of them the sentence follows. */
  function rowsNow() {
    let k = run.position;
    while (k > 0 && run.steps[k - 1].i0 === undefined) k--;
    const { i0, i1 } = run.steps[Math.max(k - 1, 0)];
    const first = i0 ?? 0;
    const end = i1 ?? Math.min(settings.br, settings.n);
    return { first, end, watched: Math.min(first + watched, end - 1) };
  }

  const columns = () => (settings.pass === "forward" ? ["m", "alpha", "l", "lse"] : ["lse", "delta"]);

  function headTable() {
    const names = columns().map((name) => `<th scope="col">${name === "alpha" ? "α" : name}</th>`);
    document.querySelector("thead").innerHTML = `<tr><th scope="col">${say(words.row)}</th>${names.join("")}</tr>`;
  }

  function tellRows({ first, end, watched }) {
    const body = document.querySelector("tbody");
    const width = columns().length + 1;
    while (body.rows.length > end - first) body.deleteRow(-1);
    while (body.rows.length < end - first) body.insertRow();
    [...body.rows].forEach((tr, k) => {
      if (tr.cells.length !== width) tr.innerHTML = "<td></td>".repeat(width);
      tr.setAttribute("aria-selected", String(first + k === watched));
      write(tr.cells[0], String(first + k));
      columns().forEach((name, c) => {
        const value = at(run.values[name], first + k);
        const cell = tr.cells[c + 1];
        const fill = `${Number.isFinite(value) ? (100 * value) / figure.scale[name] : 0}%`;
        cell.dataset.name = name;
        write(cell, Number.isNaN(value) ? "·" : story.number(value));
        if (cell.style.getPropertyValue("--fill") !== fill) cell.style.setProperty("--fill", fill);
      });
    });
  }

  const bytes = (count) => `${count.toLocaleString("en-US")} B`;

  function tellTraffic(step) {
    const { n, d, pass } = settings;
    const standard = tilewise.standardBytes(n, d, pass === "backward");
    const { read, written } = step ?? { read: 0, written: 0 };
    const last = run.steps.at(-1);
    const whole = last.read + last.written;
    const longest = Math.max(standard, whole);
    const widths = { "tiled-read": read, "tiled-written": written, standard };
    for (const [id, count] of Object.entries(widths)) element(id).style.width = `${(100 * count) / longest}%`;
    element("tiled-all").style.left = `calc(${(100 * whole) / longest}% - 2px)`;
    write(element("moved"), bytes(read + written));
    write(element("moved-parts"), say(words.moved(bytes(read), bytes(written))));
    write(element("standard-moved"), bytes(standard));
    const less = words.less(bytes(whole), (standard / whole).toFixed(1));
    const notLess = words.notLess(bytes(whole), pass === "forward" ? "i" : "j");
    write(element("compare"), say(whole < standard ? less : notLess));
    write(element("brief"), say(words.brief(bytes(read + written), bytes(standard))));
    write(element("held"), say(words.held(bytes(step ? Run.held(step) : 0), bytes(most))));
  }

  function tellErrors() {
    const errors = run.errors(truth);
    const names = settings.pass === "forward" ? ["O", "lse"] : ["dV", "dK", "dQ"];
    const shown = (name) => (name in errors ? errors[name].toExponential(1).replace("-", "−") : say(words.notYet));
    element("errors").innerHTML = names.map((name) => `<li><i>${name}</i><b>${shown(name)}</b></li>`).join("");
    const verdict = element("verdict");
    const worst = Math.max(...Object.values(errors), 0);
    const done = run.position === run.steps.length;
    const right = worst <= CLOSE;
    verdict.className = !right ? "bad" : done ? "good" : "";
    verdict.textContent = say(!right ? words.fault(worst.toExponential(1)) : done ? words.agree : words.largest);
  }

  // The language: this page's is fixed, and a link leads to the same step in the other

  function speak() {
    document.documentElement.lang = story.language;
    document.title = say(words.title);
    for (const [id, label] of Object.entries(labels)) {
      element(id).setAttribute("aria-label", say(label));
      if (element(id).matches("button")) element(id).title = say(label);
    }
    const other = element("other");
    other.textContent = say(words.other);
    other.href = say({ en: "?lang=zh", zh: "?lang=en" });
    other.addEventListener("click", () => (other.hash = address()));
  }

  // Hands

  const KEYS = {
    ArrowRight: (event) => (event.shiftKey ? goTile(1) : go(run.position + 1)),
    ArrowLeft: (event) => (event.shiftKey ? goTile(-1) : go(run.position - 1)),
    Home: () => go(0),
    End: () => go(run.steps.length),
    " ": () => (playing ? pause() : play()),
    b: () => set({ pass: settings.pass === "forward" ? "backward" : "forward" }),
    c: () => set({ causal: !settings.causal }),
  };

  function listen() {
    const press = (id, action) => element(id).addEventListener("click", action);
    const still = (action) => () => {
      pause();
      action();
    };
    press("rewind", still(() => go(0)));
    press("back", still(() => go(run.position - 1)));
    press("step", still(() => go(run.position + 1)));
    press("end", still(() => go(run.steps.length)));
    press("play", () => (playing ? pause() : play()));
    element("position").addEventListener("input", (event) => still(() => go(event.target.valueAsNumber))());
    element("speed").addEventListener("change", () => playing && (pause(), play()));
    form.addEventListener("input", () => {
      const { pass, n, d, br, bc, seed, causal } = form.elements;
      const wanted = { pass: pass.value, n: n.value, d: d.value, br: br.value, bc: bc.value, seed: seed.value };
      if (seed.value !== "" && seed.validity.valid) set({ ...wanted, causal: causal.checked });
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    addEventListener("keydown", (event) => {
      const action = KEYS[event.key];
      const busy = event.target.matches("input, select, summary") || (event.key === " " && event.target.matches("button"));
      if (!action || busy || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      if (event.key !== " ") pause();
      action(event);
    });
    document.querySelector("tbody").addEventListener("click", (event) => {
      watched = event.target.closest("tr").sectionRowIndex;
      tell();
    });
    figure.canvas.addEventListener("pointermove", inspect);
    figure.canvas.addEventListener("pointerdown", inspect);
    addEventListener("hashchange", readAddress);
    addEventListener("resize", () => figure.resize());
    for (const query of ["(prefers-color-scheme: dark)", "(prefers-contrast: more)"])
      matchMedia(query).addEventListener("change", () => (figure.retheme(), figure.draw()));
  }

  function inspect(event) {
    const box = figure.canvas.getBoundingClientRect();
    const found = figure.inspect(event.clientX - box.left - 2, event.clientY - box.top - 2);
    if (found) element("inspect").value = found.text;
  }

  function readAddress() {
    const wanted = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    set(wanted, Number(wanted.step) || 0);
  }

  for (const [name, choices] of Object.entries(CHOICES))
    form.elements[name].innerHTML = choices.map((value) => `<option>${value}</option>`).join("");
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) element("speed").value = "1";
  speak();
  listen();
  readAddress();

  return {
    figure,
    go,
    set,
    play,
    pause,
    get run() {
      return run;
    },
    get truth() {
      return truth;
    },
    get settings() {
      return { ...settings };
    },
  };
})();
