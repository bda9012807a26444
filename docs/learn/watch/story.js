// The words: the listing of each pass, why each line is there, and what it just did to one row, with its numbers.
"use strict";

tilewise.story = (() => {
  const { at } = tilewise;
  const sub = (name, index) => `<i>${name}</i><sub>${index}</sub>`;
  const [Qi, Oi, dOi, dQi, Kj, Vj, dKj, dVj] = [
    ["Q", "i"], ["O", "i"], ["dO", "i"], ["dQ", "i"], ["K", "j"], ["V", "j"], ["dK", "j"], ["dV", "j"],
  ].map(([name, index]) => sub(name, index));
  const T = "<sup>T</sup>";

  const number = (x) => {
    if (Number.isNaN(x)) return "";
    if (!Number.isFinite(x)) return x < 0 ? "−∞" : "∞";
    const size = Math.abs(x);
    const text = size !== 0 && size < 0.001 ? x.toExponential(1) : x.toFixed(3);
    return text.replaceAll("-", "−");
  };

  /** The last tile's numbers of row r, before and after the step that wrote them. */
  function row(step, name, r) {
    const entry = step.journal.find((e) => e.name === name);
    const width = entry.c1 - entry.c0;
    const cut = (data) => data.subarray((r - entry.r0) * width, (r - entry.r0 + 1) * width);
    return { before: cut(entry.before), after: cut(entry.after) };
  }

  // Each line: id, depth, what it says, why it is there, and tell(step, values, r): the same with row r's numbers.

  const forward = [
    {
      id: "for i",
      depth: 0,
      code: "for each tile of queries <i>i</i>",
    },
    {
      id: "start",
      depth: 1,
      code: `load ${Qi}; &ensp;<i>O</i> = 0, <i>m</i> = −∞, <i>l</i> = 0`,
      why: `A tile of queries comes onto the chip and stays. Its results start empty: <b>O</b> will collect the weighted
        sum of V, <b>l</b> the sum of the weights, and <b>m</b> remembers the largest score so far, of which there is none
        yet.`,
      tell: (s) => `Rows ${s.i0} to ${s.i1 - 1} are on the chip. They will not be read again.`,
    },
    {
      id: "for j",
      depth: 1,
      code: "for each tile of keys <i>j</i>",
    },
    {
      id: "load",
      depth: 2,
      code: `load ${Kj}, ${Vj}`,
      why: `The keys come by in tiles, because all of them would not fit. This is most of the traffic: every tile of
        queries reads K and V again.`,
      tell: (s) => `Keys and values ${s.j0} to ${s.j1 - 1} replace the ones before them.`,
    },
    {
      id: "scores",
      depth: 2,
      code: `<i>S</i> = <i>c</i> ${Qi} ${Kj}${T}`,
      why: `How well each query matches each key; <i>c</i> = 1/√<i>d</i> keeps the scores near one whatever the head
        size. Only this tile of S exists. Standard attention writes all of S to memory and reads it back.`,
      tell: (s, v, r) => `Query ${r} scores ${spread(row(s, "S", r).after)} against these keys.`,
    },
    {
      id: "max",
      depth: 2,
      code: `<i>m</i> ← max(<i>m</i>, rowmax <i>S</i>); &ensp;<i>α</i> = <i>e</i><sup> <i>m</i><small>old</small> − <i>m</i></sup>`,
      why: `<b>m</b> is there so that no exponent is above zero: <i>e</i><sup>S</sup> could overflow, <i>e</i><sup>S −
        m</sup> cannot, and the quotient is the same. But m may rise after part of the row was summed. <b>α</b> repairs
        that: one factor turns sums made with the old m into sums made with the new one.`,
      tell(s, v, r) {
        const { before, after } = row(s, "m", r);
        const alpha = number(at(v.alpha, r));
        if (before[0] === -Infinity)
          return `Row ${r}: the first scores, so m = ${number(after[0])} and α = 0. There was nothing to keep.`;
        if (after[0] === before[0]) return `Row ${r}: m stays at ${number(after[0])}, so α = 1 and older sums are right.`;
        return `Row ${r}: m rises from ${number(before[0])} to ${number(after[0])}; older sums shrink by α = ${alpha}.`;
      },
    },
    {
      id: "sum",
      depth: 2,
      code: `<i>P</i> = <i>e</i><sup> <i>S</i> − <i>m</i></sup>; &ensp;<i>l</i> ← <i>α l</i> + rowsum <i>P</i>`,
      why: `P holds the weights, not yet divided. <b>l</b> is what they will be divided by: softmax needs the sum over the
        whole row, and here the row is only ever seen in pieces, so the sum is carried along.`,
      tell(s, v, r) {
        const { before, after } = row(s, "l", r);
        const sum = row(s, "P", r).after.reduce((x, y) => x + y, 0);
        const kept = `${number(at(v.alpha, r))} · ${number(before[0])}`;
        return `Row ${r}: l = ${kept} + ${number(sum)} = ${number(after[0])}.`;
      },
    },
    {
      id: "output",
      depth: 2,
      code: `<i>O</i> ← <i>α O</i> + <i>P</i> ${Vj}`,
      why: `<b>O</b> gathers values by weight. What was gathered before used the old m, so it shrinks by the same α as l.
        After this line S and P are forgotten.`,
      tell(s, v, r) {
        const { before, after } = row(s, "O", r);
        return `Row ${r}: the first entry of O goes from ${number(before[0])} to ${number(after[0])}.`;
      },
    },
    {
      id: "finish",
      depth: 1,
      code: `write ${Oi} = <i>O</i> / <i>l</i>; &ensp;lse = <i>m</i> + log <i>l</i>`,
      why: `One division per row, at the end. <b>lse</b> is m and l in one number: the logarithm of the sum of all
        <i>e</i><sup>S</sup> in the row. With it the backward has P again in one step, <i>e</i><sup>S − lse</sup>, already
        divided; so the forward need not keep P.`,
      tell: (s, v, r) =>
        `Row ${r}: O is divided by ${number(at(v.l, r))}; lse = ${number(at(v.m, r))} + log ${number(at(v.l, r))} =
        ${number(at(v.lse, r))}.`,
    },
  ];

  const backward = [
    {
      id: "delta",
      depth: 0,
      code: `delta = rowsum(<i>dO</i> ∘ <i>O</i>); &ensp;<i>dQ</i> = 0`,
      why: `In softmax, raising one score lowers every other weight of its row, so the gradient of a tile needs a sum over
        the whole row, of P ∘ dP. No tile has it. <b>delta</b> is that sum: it equals dO · O, row by row, and both are in
        memory.`,
      tell: (s, v, r) => `Row ${r}: delta = ${number(at(v.delta, r))}, one number in place of a row of P and of dP.`,
    },
    {
      id: "for j",
      depth: 0,
      code: "for each tile of keys <i>j</i>",
    },
    {
      id: "start",
      depth: 1,
      code: `load ${Kj}, ${Vj}; &ensp;${dKj} = ${dVj} = 0`,
      why: `Now the keys stay and the queries come by: dK and dV add up over queries, so their sums can stay on the
        chip.`,
      tell: (s) => `Keys and values ${s.j0} to ${s.j1 - 1} are on the chip until every query that sees them came by.`,
    },
    {
      id: "for i",
      depth: 1,
      code: "for each tile of queries <i>i</i>",
    },
    {
      id: "load",
      depth: 2,
      code: `load ${Qi}, ${dOi}, lse, delta`,
      why: `Two matrices and two numbers per row are all that is needed. P is not among them: the forward did not keep
        it.`,
      tell: (s) => `Queries ${s.i0} to ${s.i1 - 1} come by.`,
    },
    {
      id: "probabilities",
      depth: 2,
      code: `<i>P</i> = <i>e</i><sup> <i>c</i> ${Qi} ${Kj}${T} − lse</sup>`,
      why: `The tile of P is computed again, with more arithmetic and much less memory. <b>lse</b> is the final m + log l,
        so there is no running maximum here, no α, and no division.`,
      tell: (s, v, r) => `Query ${r} gives these keys the weights ${spread(row(s, "P", r).after)}.`,
    },
    {
      id: "dV",
      depth: 2,
      code: `${dVj} ← ${dVj} + <i>P</i>${T} ${dOi}`,
      why: `O = P V, so each value receives the gradient of every output that used it, by the same weight.`,
      tell(s) {
        const { before, after } = row(s, "dV", s.j0);
        return `Value ${s.j0}: the first entry of dV goes from ${number(before[0])} to ${number(after[0])}.`;
      },
    },
    {
      id: "dP",
      depth: 2,
      code: `<i>dP</i> = ${dOi} ${Vj}${T}`,
      why: `The gradient of each weight, as if the weights were free: how much the loss would change if this query took
        more of this value.`,
      tell: (s, v, r) => `Query ${r}: dP is ${spread(row(s, "dP", r).after)}.`,
    },
    {
      id: "dS",
      depth: 2,
      code: `<i>dS</i> = <i>P</i> ∘ (<i>dP</i> − delta)`,
      why: `The weights are not free: they sum to one. Taking <b>delta</b>, the row's mean of dP under P, away from dP says
        so. A score whose dP equals that mean has no gradient.`,
      tell: (s, v, r) => `Query ${r}: with delta = ${number(at(v.delta, r))}, dS is ${spread(row(s, "dS", r).after)}.`,
    },
    {
      id: "dQ",
      depth: 2,
      code: `${dQi} ← ${dQi} + <i>c dS</i> ${Kj}`,
      why: `dQ adds up over keys, and here the keys stay: so dQ has to come and go at every tile, the one sum that lives in
        memory. The kernels of tilewise for Hopper do the same; its portable ones take a second walk instead, with the loops the
        other way round.`,
      tell(s, v, r) {
        const { before, after } = row(s, "dQ", r);
        return `Query ${r}: the first entry of dQ goes from ${number(before[0])} to ${number(after[0])}.`;
      },
    },
    {
      id: "dK",
      depth: 2,
      code: `${dKj} ← ${dKj} + <i>c dS</i>${T} ${Qi}`,
      why: `The mirror image of dQ. It stays on the chip. After this line P and dS are forgotten.`,
      tell(s) {
        const { before, after } = row(s, "dK", s.j0);
        return `Key ${s.j0}: the first entry of dK goes from ${number(before[0])} to ${number(after[0])}.`;
      },
    },
    {
      id: "finish",
      depth: 1,
      code: `write ${dKj}, ${dVj}`,
      why: `Every query that sees these keys came by, so the two sums are complete. They are written once.`,
      tell: (s) => `Rows ${s.j0} to ${s.j1 - 1} of dK and dV are done.`,
    },
  ];

  /** The range of a row's entries that are not hidden. */
  function spread(entries) {
    const seen = [...entries].filter(Number.isFinite);
    if (seen.length === 0) return "nothing, all of them are hidden,";
    const [low, high] = [Math.min(...seen), Math.max(...seen)];
    return low === high ? number(low) : `${number(low)} to ${number(high)}`;
  }

  const before = {
    forward: "Nothing is computed yet. Q, K and V lie in memory; O and lse are what we want.",
    backward: "The forward ran and left O and lse. The loss gave dO. Now dQ, dK and dV are wanted.",
  };

  return { backward, before, forward, number };
})();
