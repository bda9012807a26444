// The figure: every matrix as a heat map, laid out so that a query's row and a key's column run straight through all.
"use strict";

tilewise.Figure = (() => {
  const { at, story } = tilewise;
  const { say, words } = story;

  // name: label, axis that it shares with S, and palette. The order is that on the page, outwards in.
  const FORWARD = {
    left: ["Q"],
    top: ["K", "V"],
    columns: ["m", "alpha", "l"],
    right: ["O", "lse"],
    below: [],
    middle: ["P", "S"], // the first that is there is shown
  };
  const BACKWARD = {
    left: ["O", "dO", "Q"],
    top: ["K", "V"],
    columns: ["lse", "delta"],
    right: ["dQ"],
    below: ["dK", "dV"],
    middle: ["dS", "dP", "P"],
  };
  const WEIGHTS = new Set(["P", "alpha", "l"]); // never negative
  const LABELS = { alpha: "α", delta: "δ" };
  const MIDDLE = { S: words.scores, P: words.weights, dP: "dP", dS: "dS" };
  const LABEL = 18; // height of a line of labels, in CSS pixels like all that follows
  const GAP = 10;
  const ABOVE = 270; // of the window's height, what title, settings and buttons take
  const CURVE = { signed: 0.7, weight: 0.5 }; // powers below one: small numbers are told apart more easily
  const CORNER = 28; // Kᵀ and Vᵀ are labelled at their left
  const STRIP = 22; // least width of a column of one number per row

  /** To whole pixels of the screen: no seams between cells. */
  const snap = (x, round = Math.round) => round(x * (devicePixelRatio || 1)) / (devicePixelRatio || 1);

  /** Panels with their place, for cells of size u; the figure's width and height. */
  function layout({ values, options }, u) {
    const plan = options.backward ? BACKWARD : FORWARD;
    const { rows: N, cols: d } = values.Q;
    const strip = Math.max(u, STRIP - 6);
    const wide = (name) => (values[name].cols === 1 ? strip : u * d);
    const panels = [];
    let x = Math.max(0, CORNER - plan.left.reduce((sum, name) => sum + wide(name) + GAP, 0));
    const top = plan.top.length * (u * d + GAP) + LABEL - 4;
    for (const name of plan.left) {
      panels.push({ name, x, y: top, w: wide(name), h: u * N });
      x += wide(name) + GAP;
    }
    const middle = { name: plan.middle[0], names: plan.middle, x, y: top, w: u * N, h: u * N, middle: true };
    plan.top.forEach((name, k) => {
      panels.push({ name, x, y: k * (u * d + GAP), w: u * N, h: u * d, flipped: true });
    });
    panels.push(middle);
    const below = top + u * N + LABEL + 6;
    plan.below.forEach((name, k) => {
      panels.push({ name, x, y: below + k * (u * d + GAP), w: u * N, h: u * d, flipped: true });
    });
    x += u * N + GAP;
    for (const name of [...plan.columns, ...plan.right]) {
      panels.push({ name, x, y: top, w: wide(name), h: u * N });
      x += wide(name) + (values[name].cols === 1 ? Math.max(4, STRIP - strip) : GAP);
    }
    for (const panel of panels) [panel.x, panel.y] = [snap(panel.x), snap(panel.y)];
    return { panels, middle, width: x, height: below + plan.below.length * (u * d + GAP) + 2 };
  }

  // Colours

  const mix = (a, b, t) => a.map((v, k) => Math.round(v + (b[k] - v) * t));
  const parse = (hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));

  /** 65 colours from none over half to full, each the four bytes of a pixel without its alpha. */
  function ramp(stops) {
    const [none, half, full] = stops.map(parse);
    return Array.from({ length: 65 }, (_, k) => {
      const t = k / 64;
      const [r, g, b] = t < 0.5 ? mix(none, half, 2 * t) : mix(half, full, 2 * t - 1);
      return r | (g << 8) | (b << 16);
    });
  }

  /** The page's colours, from its style sheet. */
  function theme() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    const none = read("none");
    return {
      minus: ramp([none, read("minus-half"), read("minus")]),
      plus: ramp([none, read("plus-half"), read("plus")]),
      weight: ramp([none, read("weight-half"), read("weight")]),
      ink: read("ink"),
      quiet: read("quiet"),
      line: read("line"),
      accent: read("accent"),
      band: read("band"),
      empty: read("empty"),
      ground: read("ground"),
      ghost: Number(read("ghost")),
      font: getComputedStyle(document.body).fontFamily,
    };
  }

  /** The largest size of each matrix over a whole run, so that a colour means the same number at every step. */
  function scales(run) {
    const scale = {};
    const see = (name, data) => {
      const worst = data.reduce((max, x) => (Number.isFinite(x) ? Math.max(max, Math.abs(x)) : max), 0);
      scale[name] = Math.max(scale[name] ?? 1e-9, worst);
    };
    for (const [name, A] of Object.entries(run.values)) see(name, A.data);
    for (const { journal } of run.steps) for (const { name, after } of journal) see(name, after);
    if (!run.options.backward) scale.O = scale.V; // before the division O is larger than any average of values
    return scale;
  }

  class Figure {
    constructor(canvas) {
      this.canvas = canvas;
      this.context = canvas.getContext("2d");
      this.cells = document.createElement("canvas").getContext("2d"); // a panel, one pixel an entry
      this.retheme();
    }

    retheme() {
      this.colors = theme();
      const hatch = document.createElement("canvas");
      hatch.width = hatch.height = 8;
      const pen = hatch.getContext("2d");
      pen.strokeStyle = this.colors.line;
      pen.lineWidth = 1.2;
      for (const shift of [-8, 0, 8]) {
        pen.moveTo(shift, 8);
        pen.lineTo(shift + 8, 0);
      }
      pen.stroke();
      this.hatch = this.context.createPattern(hatch, "repeat");
    }

    show(run) {
      this.run = run;
      this.scale = scales(run);
      this.resize();
    }

    /** Cells as large as the figure's place allows. */
    resize() {
      const room = this.canvas.parentElement.clientWidth - 4;
      const tall = Math.max(360, Math.min(760, innerHeight - ABOVE));
      let [low, high] = [0.5, 34];
      for (let k = 0; k < 24; k++) {
        const u = (low + high) / 2;
        const { width, height } = layout(this.run, u);
        if (width <= room && height <= tall) low = u;
        else high = u;
      }
      const ratio = devicePixelRatio || 1;
      this.u = Math.max(1 / ratio, snap(low, Math.floor));
      Object.assign(this, layout(this.run, this.u));
      this.canvas.width = Math.ceil((this.width + 4) * ratio);
      this.canvas.height = Math.ceil((this.height + 4) * ratio);
      this.canvas.style.width = `${this.canvas.width / ratio}px`;
      this.canvas.style.height = `${this.canvas.height / ratio}px`;
      this.context.setTransform(ratio, 0, 0, ratio, Math.round(2 * ratio), Math.round(2 * ratio));
      this.context.lineJoin = "round";
      this.draw();
    }

    draw() {
      const pen = this.context;
      const step = this.run.current;
      pen.clearRect(-2, -2, this.width + 4, this.height + 4);
      if (step) this.#bands(step);
      for (const panel of this.panels) this.#panel(panel, step);
      this.#grid();
      if (step) this.#outlines(step, this.run.steps[this.run.position - 2]);
    }

    /** The step's rows and columns, straight through the figure. */
    #bands({ i0, i1, j0, j1 }) {
      const { middle, u, width, height } = this;
      this.context.fillStyle = this.colors.band;
      if (i0 !== undefined) this.context.fillRect(0, middle.y + i0 * u, width - GAP, (i1 - i0) * u);
      if (j0 !== undefined) this.context.fillRect(middle.x + j0 * u, 0, (j1 - j0) * u, height - 4);
    }

    #panel(panel, step) {
      const pen = this.context;
      const { x, y, w, h } = panel;
      const held = (step?.chip ?? []).filter(({ name }) => name === panel.name || panel.names?.includes(name));
      pen.globalAlpha = 0.6;
      pen.fillStyle = this.colors.empty;
      pen.fillRect(x, y, w, h);
      pen.globalAlpha = 1;
      if (panel.middle) this.#hidden(panel);
      this.#entries(panel, held);
      this.#label(panel, step);
      pen.strokeStyle = this.colors.line;
      pen.lineWidth = 1;
      pen.strokeRect(x - 0.5, y - 0.5, w + 1, h + 1);
    }

    /** Draw a panel's entries as one image, in less time than a rectangle each takes; over it hatches and digits. */
    #entries(panel, held) {
      const { rows, cols } = this.run.values[panel.name];
      const [across, down] = panel.flipped ? [rows, cols] : [cols, rows];
      const fleeting = panel.middle || ["m", "l", "alpha"].includes(panel.name); // never in slow memory
      const image = new ImageData(across, down);
      const pixels = new Uint32Array(image.data.buffer);
      const above = [];
      for (let r = 0; r < rows; r++) {
        for (let c = 0; c < cols; c++) {
          const name = this.#shown(panel, r, c);
          if (!name) continue;
          const value = at(this.run.values[name], r, c);
          const here = !fleeting || held.some((g) => g.r0 <= r && r < g.r1 && g.c0 <= c && c < g.c1);
          const size = this.#size(name, value);
          if (value !== -Infinity) pixels[panel.flipped ? c * across + r : r * across + c] = this.#pixel(name, value, size, here);
          if (value === -Infinity || this.u >= 21) above.push([r, c, value, size, here]);
        }
      }
      Object.assign(this.cells.canvas, { width: across, height: down });
      this.cells.putImageData(image, 0, 0);
      this.context.imageSmoothingEnabled = false;
      this.context.drawImage(this.cells.canvas, panel.x, panel.y, panel.w, panel.h);
      this.context.imageSmoothingEnabled = true; // for hatches
      for (const [r, c, value, size, here] of above) {
        const [x, y, w, h] = this.#box(panel, r, c, r + 1, c + 1);
        if (value === -Infinity) this.#hatched(x, y, w, h, here);
        else this.#digits(value, size, x + w / 2, y + h / 2, here);
      }
      this.context.globalAlpha = 1;
    }

    /** Which of a panel's matrices to show at an entry: in the middle, the newest that this tile has. */
    #shown(panel, r, c) {
      const names = panel.names ?? [panel.name];
      return names.find((name) => !Number.isNaN(at(this.run.values[name], r, c)));
    }

    #box(panel, r0, c0, r1, c1) {
      const { x, y } = panel;
      const { rows, cols } = this.run.values[panel.name];
      const [dx, dy] = panel.flipped ? [panel.w / rows, panel.h / cols] : [panel.w / cols, panel.h / rows];
      if (panel.flipped) [r0, c0, r1, c1] = [c0, r0, c1, r1];
      return [x + c0 * dx, y + r0 * dy, (c1 - c0) * dx, (r1 - r0) * dy];
    }

    /** Where a number lies between zero and the largest, in 64 steps. */
    #size(name, value) {
      const curve = CURVE[WEIGHTS.has(name) ? "weight" : "signed"];
      return Math.round(64 * Math.min(1, Math.abs(value) / this.scale[name]) ** curve);
    }

    #pixel(name, value, size, here) {
      const { minus, plus, weight, ghost } = this.colors;
      const ramp = WEIGHTS.has(name) ? weight : value < 0 ? minus : plus;
      return ramp[size] | (Math.round(255 * (here ? 1 : ghost)) << 24);
    }

    #hatched(x, y, w, h, here) {
      this.context.globalAlpha = here ? 1 : 0.5;
      this.context.fillStyle = this.hatch;
      this.context.fillRect(x, y, w, h);
    }

    #digits(value, size, x, y, here) {
      const pen = this.context;
      pen.globalAlpha = here ? 1 : 0.45;
      pen.fillStyle = here && size > 40 ? this.colors.ground : this.colors.ink;
      pen.font = `${Math.min(11, this.u * 0.37)}px ${this.colors.font}`;
      pen.textAlign = "center";
      pen.textBaseline = "middle";
      const text = value.toFixed(this.u >= 30 ? 2 : 1).replace(/^-(0\.0+)$/, "$1"); // no minus zero
      pen.fillText(text.replace("-", "−"), x, y + 0.5);
    }

    /** Tiles that a causal mask never visits. */
    #hidden(panel) {
      const { B_r, B_c, causal } = this.run.options;
      const { rows: N } = this.run.values.Q;
      if (!causal) return;
      this.context.fillStyle = this.hatch;
      for (let i0 = 0; i0 < N; i0 += B_r) {
        const i1 = Math.min(i0 + B_r, N);
        const first = Math.ceil(i1 / B_c) * B_c;
        if (first < N) this.context.fillRect(...this.#box(panel, i0, first, i1, N));
      }
    }

    #label(panel, step) {
      const pen = this.context;
      pen.fillStyle = this.colors.quiet;
      pen.textBaseline = "alphabetic";
      pen.textAlign = "center";
      pen.font = `${panel.middle ? "" : "italic "}13px ${this.colors.font}`;
      const { x, y, w, h } = panel;
      const text = LABELS[panel.name] ?? panel.name;
      if (panel.middle) {
        const newest = panel.names.find((name) => step?.chip.some((g) => g.name === name));
        pen.textAlign = "left";
        pen.fillText(say(newest ? MIDDLE[newest] : words.oneTile), x, y + h + LABEL - 3);
      } else if (panel.flipped) {
        pen.textAlign = "right";
        pen.fillText(`${text}ᵀ`, x - 7, y + Math.min(h, Math.max(12, h / 2 + 5)));
      } else pen.fillText(text, x + w / 2, y - 6);
    }

    /** The tiles' edges on S. */
    #grid() {
      const { middle, u } = this;
      const { B_r, B_c } = this.run.options;
      const { rows: N } = this.run.values.Q;
      const pen = this.context;
      pen.beginPath();
      for (let i = B_r; i < N; i += B_r) {
        pen.moveTo(middle.x, middle.y + i * u);
        pen.lineTo(middle.x + middle.w, middle.y + i * u);
      }
      for (let j = B_c; j < N; j += B_c) {
        pen.moveTo(middle.x + j * u, middle.y);
        pen.lineTo(middle.x + j * u, middle.y + middle.h);
      }
      pen.strokeStyle = this.colors.line;
      pen.lineWidth = 0.75;
      pen.stroke();
    }

    /** Thin: on the chip. Thick: what this step loaded or computed. */
    #outlines({ chip, journal }, last) {
      const known = new Set(last?.chip.map(({ name, r0, c0 }) => `${name} ${r0} ${c0}`));
      const loaded = chip.filter(({ name, r0, c0 }) => !known.has(`${name} ${r0} ${c0}`));
      const pen = this.context;
      pen.strokeStyle = this.colors.accent;
      for (const [regions, width] of [[chip, 1.25], [[...loaded, ...journal], 3]]) {
        pen.lineWidth = width;
        for (const { name, r0, r1, c0, c1 } of regions) {
          const panel = this.panels.find((p) => p.name === name || p.names?.includes(name));
          const [x, y, w, h] = this.#box(panel, r0, c0, r1, c1);
          pen.strokeRect(x - 0.5, y - 0.5, w + 1, h + 1);
        }
      }
    }

    /** What lies under a point of the canvas: { name, r, c, value }, or null. */
    inspect(x, y) {
      const panel = this.panels.find((p) => x >= p.x && x < p.x + p.w && y >= p.y && y < p.y + p.h);
      if (!panel) return null;
      const { rows, cols } = this.run.values[panel.name];
      const [across, down] = [(x - panel.x) / panel.w, (y - panel.y) / panel.h];
      const [r, c] = (panel.flipped ? [across * rows, down * cols] : [down * rows, across * cols]).map(Math.floor);
      const name = this.#shown(panel, r, c) ?? panel.names?.at(-1) ?? panel.name;
      const value = at(this.run.values[name], r, c);
      const index = cols === 1 ? `[${r}]` : `[${r}, ${c}]`;
      const text = Number.isNaN(value) ? say(words.missing) : story.number(value);
      return { name, r, c, value, text: `${LABELS[name] ?? name}${index} = ${text}` };
    }
  }

  return Figure;
})();
