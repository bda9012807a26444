// The algorithm, without a page: one head of attention as a list of steps that can be done and undone.
//
//   inputs(N, d, seed)            Q, K, V, dO: small numbers that anyone can draw again from the seed
//   run(inputs, options)          the tiles of FlashAttention-2, forward or backward, as a Run
//   direct(inputs, causal)        the same results by the formula, every row whole: what a Run is checked against
//
// A matrix is { rows, cols, data }, row by row. NaN stands for a number that is not there yet.
"use strict";

const tilewise = (() => {
  const BYTES = 4; // of one number, fp32

  // Matrices

  const matrix = (rows, cols, fill = NaN) => ({ rows, cols, data: new Float64Array(rows * cols).fill(fill) });

  /** Rows r0:r1, copied. */
  const part = (A, r0, r1) => ({ rows: r1 - r0, cols: A.cols, data: A.data.slice(r0 * A.cols, r1 * A.cols) });

  /** A matrix of f(r, c). */
  function make(rows, cols, f) {
    const A = matrix(rows, cols);
    for (let r = 0; r < rows; r++) for (let c = 0; c < cols; c++) A.data[r * cols + c] = f(r, c);
    return A;
  }

  const at = (A, r, c = 0) => A.data[r * A.cols + c];

  const transposed = (A) => make(A.cols, A.rows, (r, c) => at(A, c, r));

  const product = (A, B) =>
    make(A.rows, B.cols, (r, c) => {
      let sum = 0;
      for (let k = 0; k < A.cols; k++) sum += at(A, r, k) * at(B, k, c);
      return sum;
    });

  const plus = (A, B) => make(A.rows, A.cols, (r, c) => at(A, r, c) + at(B, r, c));

  /** One number per row, as a column. */
  const fold = (A, f, start) => make(A.rows, 1, (r) => A.data.subarray(r * A.cols, (r + 1) * A.cols).reduce(f, start));

  const rowMax = (A) => fold(A, (x, y) => Math.max(x, y), -Infinity);
  const rowSum = (A) => fold(A, (x, y) => x + y, 0);

  // Inputs

  /** Marsaglia's xorshift over 32 bits: numbers in (0, 1). */
  function uniform(seed) {
    let x = Math.imul(seed + 1, 0x9e3779b1) | 1;
    return () => {
      x ^= x << 13;
      x ^= x >>> 17;
      x ^= x << 5;
      return ((x >>> 0) + 0.5) / 4294967296;
    };
  }

  /** Normal numbers with two decimals, so that a line can be checked by hand. */
  function inputs(N, d, seed) {
    const random = uniform(seed);
    for (let skip = 0; skip < 8; skip++) random(); // near seeds start alike
    const normal = () => Math.sqrt(-2 * Math.log(random())) * Math.cos(2 * Math.PI * random());
    const draw = () => make(N, d, () => Math.round(100 * normal()) / 100);
    return { Q: draw(), K: draw(), V: draw(), dO: draw() };
  }

  // A run: steps, each a list of writes

  /** What a step touches of a matrix: rows r0:r1, columns c0:c1. */
  const region = (name, r0, r1, c0 = 0, c1 = Infinity) => ({ name, r0, r1, c0, c1 });

  class Run {
    /** `values` by name; `given` are those that lie in memory before the first step. */
    constructor(values, options) {
      this.values = values;
      this.options = options;
      this.steps = [];
      this.position = 0;
    }

    /** One line of the listing, done: `writes` by name as [tile, first row, first column], traffic in numbers. */
    step(line, tile, { writes = {}, chip = [], read = 0, written = 0, final = [] }) {
      const last = this.steps.at(-1);
      const journal = Object.entries(writes).map(([name, [A, r0, c0 = 0]]) => this.#write(name, A, r0, c0));
      this.steps.push({
        line,
        ...tile,
        journal,
        chip: chip.map((r) => ({ ...r, c1: Math.min(r.c1, this.values[r.name].cols) })),
        read: (last?.read ?? 0) + BYTES * read,
        written: (last?.written ?? 0) + BYTES * written,
        final,
      });
      this.position = this.steps.length;
    }

    #write(name, A, r0, c0) {
      const entry = { ...region(name, r0, r0 + A.rows, c0, c0 + A.cols), after: A.data };
      const target = this.values[name];
      entry.before = make(A.rows, A.cols, (r, c) => at(target, r0 + r, c0 + c)).data;
      this.#copy(entry, entry.after);
      return entry;
    }

    #copy({ name, r0, r1, c0, c1 }, source) {
      const target = this.values[name];
      for (let r = r0; r < r1; r++)
        target.data.set(source.subarray((r - r0) * (c1 - c0), (r - r0 + 1) * (c1 - c0)), r * target.cols + c0);
    }

    /** Do or undo steps until `position` of them are done. */
    seek(position) {
      const goal = Math.max(0, Math.min(this.steps.length, Math.round(position) || 0));
      while (this.position < goal) for (const entry of this.steps[this.position++].journal) this.#copy(entry, entry.after);
      while (this.position > goal) {
        const { journal } = this.steps[--this.position];
        for (const entry of journal) this.#copy(entry, entry.before);
      }
    }

    /** The step done last, or undefined at the start. */
    get current() {
      return this.steps[this.position - 1];
    }

    /** Numbers of a step's tiles, in bytes: what the chip has to hold. */
    static held = ({ chip }) => BYTES * chip.reduce((sum, { r0, r1, c0, c1 }) => sum + (r1 - r0) * (c1 - c0), 0);

    /** The largest difference from `truth` among results that are final by now, by name. */
    errors(truth) {
      const errors = {};
      for (const { final } of this.steps.slice(0, this.position))
        for (const { name, r0, r1 } of final) {
          const [A, B] = [this.values[name], truth[name]];
          let worst = errors[name] ?? 0;
          for (let k = r0 * A.cols; k < r1 * A.cols; k++) {
            const difference = Math.abs(A.data[k] - B.data[k]);
            worst = difference <= worst ? worst : difference; // a NaN is never <=, so it stays and shows
          }
          errors[name] = worst;
        }
      return errors;
    }
  }

  // The tiles

  /** S = c Q_i K_j^T; -inf where key j comes after query i. */
  function scores(Q_i, K_j, causal, i0, j0) {
    const c = 1 / Math.sqrt(Q_i.cols);
    const QK = product(Q_i, transposed(K_j));
    return make(QK.rows, QK.cols, (r, k) => (causal && j0 + k > i0 + r ? -Infinity : c * at(QK, r, k)));
  }

  /** Query tiles outside, key tiles inside: O, m and l of a tile stay on the chip until they are done. */
  function forward({ Q, K, V }, { B_r, B_c, causal }) {
    const [N, d] = [Q.rows, Q.cols];
    const column = () => matrix(N, 1);
    const values = { Q, K, V, S: matrix(N, N), P: matrix(N, N), m: column(), l: column(), alpha: column() };
    const run = new Run({ ...values, O: matrix(N, d), lse: column() }, { B_r, B_c, causal, backward: false });
    for (let i0 = 0; i0 < N; i0 += B_r) {
      const i1 = Math.min(i0 + B_r, N);
      const rows = i1 - i0;
      const Q_i = part(Q, i0, i1);
      let O = matrix(rows, d, 0);
      let m = matrix(rows, 1, -Infinity);
      let l = matrix(rows, 1, 0);
      const stays = [region("Q", i0, i1), region("O", i0, i1), region("m", i0, i1), region("l", i0, i1)];
      run.step("start", { i0, i1 }, { writes: { O: [O, i0], m: [m, i0], l: [l, i0] }, chip: stays, read: rows * d });
      const end = causal ? i1 : N; // the last row of the tile sees no key after itself
      for (let j0 = 0; j0 < end; j0 += B_c) {
        const j1 = Math.min(j0 + B_c, N);
        const [K_j, V_j] = [part(K, j0, j1), part(V, j0, j1)];
        const tile = { i0, i1, j0, j1 };
        const loaded = [...stays, region("K", j0, j1), region("V", j0, j1)];
        run.step("load", tile, { chip: loaded, read: 2 * (j1 - j0) * d });

        const S = scores(Q_i, K_j, causal, i0, j0);
        run.step("scores", tile, { writes: { S: [S, i0, j0] }, chip: [...loaded, region("S", i0, i1, j0, j1)] });

        const newest = rowMax(S);
        const m_new = make(rows, 1, (r) => Math.max(at(m, r), at(newest, r)));
        const alpha = make(rows, 1, (r) => Math.exp(at(m, r) - at(m_new, r)));
        const chip = [...loaded, region("alpha", i0, i1)];
        const writes = { m: [m_new, i0], alpha: [alpha, i0] };
        run.step("max", tile, { writes, chip: [...chip, region("S", i0, i1, j0, j1)] });
        m = m_new;

        const P = make(rows, j1 - j0, (r, k) => Math.exp(at(S, r, k) - at(m, r)));
        const sums = rowSum(P);
        l = make(rows, 1, (r) => at(alpha, r) * at(l, r) + at(sums, r));
        chip.push(region("P", i0, i1, j0, j1)); // where S was
        run.step("sum", tile, { writes: { P: [P, i0, j0], l: [l, i0] }, chip });

        const PV = product(P, V_j);
        O = make(rows, d, (r, k) => at(alpha, r) * at(O, r, k) + at(PV, r, k));
        run.step("output", tile, { writes: { O: [O, i0] }, chip });
      }
      O = make(rows, d, (r, k) => at(O, r, k) / at(l, r));
      const lse = make(rows, 1, (r) => at(m, r) + Math.log(at(l, r)));
      run.step("finish", { i0, i1 }, {
        writes: { O: [O, i0], lse: [lse, i0] },
        chip: [...stays, region("lse", i0, i1)],
        written: rows * (d + 1),
        final: [region("O", i0, i1), region("lse", i0, i1)],
      });
    }
    return run;
  }

  /** Key tiles outside, query tiles inside: dK and dV of a tile stay, dQ is read, added to and written. */
  function backward({ Q, K, V, dO }, { B_r, B_c, causal }) {
    const [N, d] = [Q.rows, Q.cols];
    const c = 1 / Math.sqrt(d);
    const { O, lse } = forward({ Q, K, V }, { B_r, B_c, causal }).values; // what the forward left in memory
    const given = { Q, K, V, dO, O, lse };
    const square = () => matrix(N, N);
    const grads = { delta: matrix(N, 1), dQ: matrix(N, d), dK: matrix(N, d), dV: matrix(N, d) };
    const run = new Run(
      { ...given, P: square(), dP: square(), dS: square(), ...grads },
      { B_r, B_c, causal, backward: true },
    );
    const delta = rowSum(make(N, d, (r, k) => at(dO, r, k) * at(O, r, k)));
    const dQ = [];
    for (let i0 = 0; i0 < N; i0 += B_r) {
      const i1 = Math.min(i0 + B_r, N);
      dQ.push(matrix(i1 - i0, d, 0));
      run.step("delta", { i0, i1 }, {
        writes: { delta: [part(delta, i0, i1), i0], dQ: [dQ.at(-1), i0] },
        chip: [region("O", i0, i1), region("dO", i0, i1), region("delta", i0, i1)],
        read: (i1 - i0) * 2 * d,
        written: (i1 - i0) * (d + 1), // delta, and zeros into dQ
      });
    }
    for (let j0 = 0; j0 < N; j0 += B_c) {
      const j1 = Math.min(j0 + B_c, N);
      const columns = j1 - j0;
      const [K_j, V_j] = [part(K, j0, j1), part(V, j0, j1)];
      let [dK, dV] = [matrix(columns, d, 0), matrix(columns, d, 0)];
      const stays = ["K", "V", "dK", "dV"].map((name) => region(name, j0, j1));
      const zeros = { dK: [dK, j0], dV: [dV, j0] };
      run.step("start", { j0, j1 }, { writes: zeros, chip: stays, read: 2 * columns * d });
      const first = causal ? Math.floor(j0 / B_r) * B_r : 0; // tiles of rows before it see no key of this block
      for (let i0 = first; i0 < N; i0 += B_r) {
        const i1 = Math.min(i0 + B_r, N);
        const rows = i1 - i0;
        const [Q_i, dO_i, lse_i, delta_i] = [Q, dO, lse, delta].map((A) => part(A, i0, i1));
        const tile = { i0, i1, j0, j1 };
        const chip = [...stays, ...["Q", "dO", "lse", "delta"].map((name) => region(name, i0, i1))];
        run.step("load", tile, { chip, read: rows * (2 * d + 2) });

        const S = scores(Q_i, K_j, causal, i0, j0);
        const P = make(rows, columns, (r, k) => Math.exp(at(S, r, k) - at(lse_i, r)));
        const square = region("P", i0, i1, j0, j1);
        run.step("probabilities", tile, { writes: { P: [P, i0, j0] }, chip: [...chip, square] });

        dV = plus(dV, product(transposed(P), dO_i));
        run.step("dV", tile, { writes: { dV: [dV, j0] }, chip: [...chip, square] });

        const dP = product(dO_i, transposed(V_j));
        const both = [...chip, square, region("dP", i0, i1, j0, j1)];
        run.step("dP", tile, { writes: { dP: [dP, i0, j0] }, chip: both });

        const dS = make(rows, columns, (r, k) => at(P, r, k) * (at(dP, r, k) - at(delta_i, r)));
        const full = [...chip, region("dS", i0, i1, j0, j1)];
        run.step("dS", tile, { writes: { dS: [dS, i0, j0] }, chip: [...full, square] });

        const index = i0 / B_r;
        const dSK = product(dS, K_j);
        dQ[index] = make(rows, d, (r, k) => at(dQ[index], r, k) + c * at(dSK, r, k));
        run.step("dQ", tile, {
          writes: { dQ: [dQ[index], i0] },
          chip: [...full, region("dQ", i0, i1)],
          read: rows * d,
          written: rows * d,
        });

        const dSQ = product(transposed(dS), Q_i);
        dK = make(columns, d, (r, k) => at(dK, r, k) + c * at(dSQ, r, k));
        run.step("dK", tile, { writes: { dK: [dK, j0] }, chip: full });
      }
      const final = [region("dK", j0, j1), region("dV", j0, j1), ...(j1 === N ? [region("dQ", 0, N)] : [])];
      run.step("finish", { j0, j1 }, { chip: stays, written: 2 * columns * d, final });
    }
    return run;
  }

  /** `options`: B_r, B_c, causal, backward. The run stands at its start. */
  function run(given, options) {
    const made = (options.backward ? backward : forward)(given, options);
    made.seek(0);
    return made;
  }

  // The other way to the same numbers

  /** The formula, one whole row after another: no tiles, no running sums, and no code shared with the tiles. */
  function direct({ Q, K, V, dO }, causal) {
    const [N, d] = [Q.rows, Q.cols];
    const zeros = () => matrix(N, d, 0);
    const truth = { O: zeros(), lse: matrix(N, 1), dQ: zeros(), dK: zeros(), dV: zeros() };
    const dot = (A, r, B, s) => A.data.subarray(r * d, r * d + d).reduce((sum, x, k) => sum + x * B.data[s * d + k], 0);
    const add = (A, r, factor, B, s) => {
      for (let k = 0; k < d; k++) A.data[r * d + k] += factor * B.data[s * d + k];
    };
    for (let i = 0; i < N; i++) {
      const keys = [...Array(causal ? i + 1 : N).keys()];
      const weights = keys.map((j) => Math.exp(dot(Q, i, K, j) / Math.sqrt(d)));
      const total = weights.reduce((x, y) => x + y);
      const P = weights.map((w) => w / total);
      const dP = keys.map((j) => dot(dO, i, V, j));
      const mean = P.reduce((sum, p, j) => sum + p * dP[j], 0);
      truth.lse.data[i] = Math.log(total);
      for (const j of keys) {
        const dS = (P[j] * (dP[j] - mean)) / Math.sqrt(d);
        add(truth.O, i, P[j], V, j);
        add(truth.dV, j, P[j], dO, i);
        add(truth.dQ, i, dS, K, j);
        add(truth.dK, j, dS, Q, i);
      }
    }
    return truth;
  }

  /** Bytes of the three products with S and P in memory, as the paper's algorithms 0 and 3 move them. */
  function standardBytes(N, d, isBackward) {
    return BYTES * (isBackward ? 7 * N * N + 8 * N * d : 4 * N * N + 4 * N * d);
  }

  return { BYTES, Run, at, direct, inputs, run, standardBytes };
})();

globalThis.tilewise = tilewise;
