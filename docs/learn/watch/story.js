// The words, in English and Chinese: the listing of each pass, why each line is there, what it just did to one row.
//
// A text is { en, zh }, or a string where both languages write the same.
"use strict";

tilewise.story = (() => {
  const { at } = tilewise;
  const language = new URLSearchParams(globalThis.location?.search).get("lang") === "zh" ? "zh" : "en";

  /** A text in the page's language. */
  const say = (text) => text[language] ?? text;

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

  // Each line: id, depth, the code, why it is there, and tell(step, values, r): what it just did to row r, with its numbers.

  const forward = [
    {
      id: "for i",
      depth: 0,
      code: { en: "for each tile of queries <i>i</i>", zh: "对每一块查询 <i>i</i>" },
    },
    {
      id: "start",
      depth: 1,
      code: {
        en: `load ${Qi}; &ensp;<i>O</i> = 0, <i>m</i> = −∞, <i>l</i> = 0`,
        zh: `读入 ${Qi}；<i>O</i> = 0，<i>m</i> = −∞，<i>l</i> = 0`,
      },
      why: {
        en: `A tile of queries is loaded onto the chip and stays there. Its results start empty: <b>O</b> will collect the
          weighted sum of V, <b>l</b> the sum of the weights, and <b>m</b> the largest score so far.`,
        zh: `一块查询读到片上，一直留到算完。它的结果从零开始：<b>O</b> 累加 V 的加权和，<b>l</b> 累加权重之和，<b>m</b>
          记录到目前为止最大的分数。`,
      },
      tell: (s) => ({
        en: `Rows ${s.i0} to ${s.i1 - 1} are on the chip. They will not be read again.`,
        zh: `第 ${s.i0} 到 ${s.i1 - 1} 行已在片上，不会再读第二次。`,
      }),
    },
    {
      id: "for j",
      depth: 1,
      code: { en: "for each tile of keys <i>j</i>", zh: "对每一块键 <i>j</i>" },
    },
    {
      id: "load",
      depth: 2,
      code: { en: `load ${Kj}, ${Vj}`, zh: `读入 ${Kj}，${Vj}` },
      why: {
        en: `All keys at once would not fit, so they are loaded tile by tile. This is most of the traffic: every tile of
          queries reads K and V again.`,
        zh: `片上放不下所有的键，所以一块一块地读。访存主要花在这里：每一块查询都要把 K 和 V 重读一遍。`,
      },
      tell: (s) => ({
        en: `Keys and values ${s.j0} to ${s.j1 - 1} are on the chip.`,
        zh: `第 ${s.j0} 到 ${s.j1 - 1} 个键和值已在片上。`,
      }),
    },
    {
      id: "scores",
      depth: 2,
      code: `<i>S</i> = <i>c</i> ${Qi} ${Kj}${T}`,
      why: {
        en: `How well each query matches each key. The factor <i>c</i> = 1/√<i>d</i> keeps the scores near one, whatever the
          head size. Only this tile of S exists. Standard attention writes all of S to memory and reads it back.`,
        zh: `每个查询与每个键的匹配程度。不论头维度多大，系数 <i>c</i> = 1/√<i>d</i> 都让分数保持在 1
          附近。这里只存在这一块 S；标准注意力则要把整个 S 写进显存，再读回来。`,
      },
      tell(s, v, r) {
        const scores = range(row(s, "S", r).after);
        return scores
          ? { en: `Query ${r}: its scores are ${scores}.`, zh: `查询 ${r}：分数为 ${scores}。` }
          : { en: `Query ${r} sees none of these keys: the mask hides them.`, zh: `查询 ${r} 看不到这些键：它们被掩码遮住了。` };
      },
    },
    {
      id: "max",
      depth: 2,
      code: `<i>m</i> ← max(<i>m</i>, rowmax <i>S</i>); &ensp;<i>α</i> = <i>e</i><sup> <i>m</i><small>old</small> − <i>m</i></sup>`,
      why: {
        en: `<b>m</b> keeps every exponent at or below zero: <i>e</i><sup>S</sup> could overflow, <i>e</i><sup>S − m</sup>
          cannot, and the quotient is the same. But m may rise after part of the row was summed. <b>α</b> corrects that:
          one factor turns sums made with the old m into sums made with the new one.`,
        zh: `<b>m</b> 使指数都不大于零：<i>e</i><sup>S</sup> 可能溢出，<i>e</i><sup>S − m</sup>
          不会，而两者的商相同。但一行累加到一半时，m 还可能变大。<b>α</b> 就是为此作的修正：乘上这一个因子，用旧的 m
          求出的和就成了用新的 m 求出的和。`,
      },
      tell(s, v, r) {
        const [before, after] = ["before", "after"].map((time) => row(s, "m", r)[time][0]);
        const [old, m, alpha] = [before, after, at(v.alpha, r)].map(number);
        if (before === -Infinity)
          return {
            en: `Row ${r}: the first scores, so m = ${m} and α = 0. There was nothing to keep.`,
            zh: `第 ${r} 行：这是第一批分数，所以 m = ${m}，α = 0：之前没有要保留的东西。`,
          };
        if (after === before)
          return {
            en: `Row ${r}: m stays at ${m}, so α = 1 and older sums are right.`,
            zh: `第 ${r} 行：m 仍为 ${m}，所以 α = 1，之前的和不用修正。`,
          };
        return {
          en: `Row ${r}: m rises from ${old} to ${m}; older sums shrink by α = ${alpha}.`,
          zh: `第 ${r} 行：m 从 ${old} 增大到 ${m}，之前的和都乘以 α = ${alpha}。`,
        };
      },
    },
    {
      id: "sum",
      depth: 2,
      code: `<i>P</i> = <i>e</i><sup> <i>S</i> − <i>m</i></sup>; &ensp;<i>l</i> ← <i>α l</i> + rowsum <i>P</i>`,
      why: {
        en: `P holds the weights, not yet divided. <b>l</b> is what they will be divided by. Softmax needs the sum over the
          whole row, and here only one piece of the row is seen at a time, so the sum is carried along.`,
        zh: `P 是尚未做除法的权重，<b>l</b> 是它们将来的除数。softmax 需要整行之和，而这里每次只看到一行中的一段，所以要一边走一边累加。`,
      },
      tell(s, v, r) {
        const { before, after } = row(s, "l", r);
        const sum = row(s, "P", r).after.reduce((x, y) => x + y, 0);
        const formula = `l = ${number(at(v.alpha, r))} · ${number(before[0])} + ${number(sum)} = ${number(after[0])}`;
        return { en: `Row ${r}: ${formula}.`, zh: `第 ${r} 行：${formula}。` };
      },
    },
    {
      id: "output",
      depth: 2,
      code: `<i>O</i> ← <i>α O</i> + <i>P</i> ${Vj}`,
      why: {
        en: `<b>O</b> collects values by weight. What it holds so far used the old m, so it shrinks by the same α as l.
          After this line S and P are discarded.`,
        zh: `<b>O</b> 按权重累加各个值。已经累加的部分用的是旧的 m，所以要和 l 一样乘以 α。这一行之后，S 和 P 就丢弃了。`,
      },
      tell: (s, v, r) => firstEntry(s, "O", r, "row"),
    },
    {
      id: "finish",
      depth: 1,
      code: {
        en: `write ${Oi} = <i>O</i> / <i>l</i>; &ensp;lse = <i>m</i> + log <i>l</i>`,
        zh: `写出 ${Oi} = <i>O</i> / <i>l</i>；lse = <i>m</i> + log <i>l</i>`,
      },
      why: {
        en: `One division per row, at the end. <b>lse</b> is m and l in one number: the logarithm of the sum of all
          <i>e</i><sup>S</sup> in the row. With it the backward has P again in one step, <i>e</i><sup>S − lse</sup>, already
          divided; so the forward need not keep P.`,
        zh: `每行只在最后做一次除法。<b>lse</b> 把 m 和 l 合成一个数，即整行 <i>e</i><sup>S</sup>
          之和的对数。有了它，反向只用一步 <i>e</i><sup>S − lse</sup> 就重新得到 P，而且已经除好，所以前向不必保留 P。`,
      },
      tell(s, v, r) {
        const [m, l, lse] = [v.m, v.l, v.lse].map((A) => number(at(A, r)));
        return {
          en: `Row ${r}: O is divided by ${l}; lse = ${m} + log ${l} = ${lse}.`,
          zh: `第 ${r} 行：O 除以 ${l}；lse = ${m} + log ${l} = ${lse}。`,
        };
      },
    },
  ];

  const backward = [
    {
      id: "delta",
      depth: 0,
      code: `delta = rowsum(<i>dO</i> ∘ <i>O</i>); &ensp;<i>dQ</i> = 0`,
      why: {
        en: `In softmax, raising one score lowers every other weight of its row, so the gradient of a tile needs a sum over
          the whole row, of P ∘ dP. No tile has it. <b>delta</b> is that sum: it equals dO · O, row by row, and both are in
          memory.`,
        zh: `在 softmax 里，一个分数增大，同一行的其他权重都会减小。所以一块的梯度需要 P ∘ dP 在整行上的和，而一块里没有整行。<b>delta</b>
          就是这个和：它等于 dO 与 O 对应行的内积，而这两个矩阵都在显存里。`,
      },
      tell(s, v, r) {
        const delta = number(at(v.delta, r));
        return {
          en: `Row ${r}: delta = ${delta}, one number in place of a row of P and of dP.`,
          zh: `第 ${r} 行：delta = ${delta}，一个数代替了 P 和 dP 的一整行。`,
        };
      },
    },
    {
      id: "for j",
      depth: 0,
      code: { en: "for each tile of keys <i>j</i>", zh: "对每一块键 <i>j</i>" },
    },
    {
      id: "start",
      depth: 1,
      code: { en: `load ${Kj}, ${Vj}; &ensp;${dKj} = ${dVj} = 0`, zh: `读入 ${Kj}，${Vj}；${dKj} = ${dVj} = 0` },
      why: {
        en: `Now the keys are the outer loop and the queries the inner one: dK and dV are sums over queries, so these sums can
          stay on the chip.`,
        zh: `现在键在外层循环，查询在内层循环：dK 和 dV 是对查询求和，所以这两个和可以一直留在片上。`,
      },
      tell: (s) => ({
        en: `Keys and values ${s.j0} to ${s.j1 - 1} stay on the chip until every query that sees them is done.`,
        zh: `第 ${s.j0} 到 ${s.j1 - 1} 个键和值留在片上，直到看得到它们的查询全部处理完。`,
      }),
    },
    {
      id: "for i",
      depth: 1,
      code: { en: "for each tile of queries <i>i</i>", zh: "对每一块查询 <i>i</i>" },
    },
    {
      id: "load",
      depth: 2,
      code: { en: `load ${Qi}, ${dOi}, lse, delta`, zh: `读入 ${Qi}，${dOi}，lse，delta` },
      why: {
        en: `Two matrices and two numbers per row are all that is needed. P is not among them: the forward did not keep
          it.`,
        zh: `需要的只有两个矩阵，外加每行两个数。其中没有 P，因为前向没有保留它。`,
      },
      tell: (s) => ({
        en: `Queries ${s.i0} to ${s.i1 - 1} are on the chip.`,
        zh: `第 ${s.i0} 到 ${s.i1 - 1} 个查询已在片上。`,
      }),
    },
    {
      id: "probabilities",
      depth: 2,
      code: `<i>P</i> = <i>e</i><sup> <i>c</i> ${Qi} ${Kj}${T} − lse</sup>`,
      why: {
        en: `The tile of P is computed again: more arithmetic, and much less memory. <b>lse</b> is the final m + log l, so
          there is no running maximum here, no α, and no division.`,
        zh: `这一块 P 是重新算出来的：运算多了，占用的存储少得多。<b>lse</b> 就是最终的 m + log
          l，所以这里没有不断更新的最大值，没有 α，也没有除法。`,
      },
      tell(s, v, r) {
        const weights = range(row(s, "P", r).after);
        return { en: `Query ${r}: its weights are ${weights}.`, zh: `查询 ${r}：权重为 ${weights}。` };
      },
    },
    {
      id: "dV",
      depth: 2,
      code: `${dVj} ← ${dVj} + <i>P</i>${T} ${dOi}`,
      why: {
        en: `O = P V, so each value receives the gradient of every output that used it, by the same weight.`,
        zh: `由于 O = P V，每个值都从用到它的各个输出那里得到梯度，权重与前向相同。`,
      },
      tell: (s) => firstEntry(s, "dV", s.j0, "value"),
    },
    {
      id: "dP",
      depth: 2,
      code: `<i>dP</i> = ${dOi} ${Vj}${T}`,
      why: {
        en: `The gradient of each weight, as if the weights were independent: how much the loss would change if this query
          took more of this value.`,
        zh: `假如各个权重互不相关，这就是每个权重的梯度：这个查询多取一点这个值，损失会变化多少。`,
      },
      tell(s, v, r) {
        const dP = range(row(s, "dP", r).after);
        return { en: `Query ${r}: dP is ${dP}.`, zh: `查询 ${r}：dP 为 ${dP}。` };
      },
    },
    {
      id: "dS",
      depth: 2,
      code: `<i>dS</i> = <i>P</i> ∘ (<i>dP</i> − delta)`,
      why: {
        en: `The weights are not independent: they sum to one. So <b>delta</b>, the row's mean of dP under P, is subtracted
          from dP. A score whose dP equals that mean has no gradient.`,
        zh: `权重并非互不相关：它们的和是 1。所以要从 dP 中减去 <b>delta</b>，也就是这一行的 dP 以 P 为权重的平均值。如果某个分数的 dP
          恰好等于这个平均值，它的梯度就是零。`,
      },
      tell(s, v, r) {
        const [delta, dS] = [number(at(v.delta, r)), range(row(s, "dS", r).after)];
        return { en: `Query ${r}: with delta = ${delta}, dS is ${dS}.`, zh: `查询 ${r}：delta = ${delta}，dS 为 ${dS}。` };
      },
    },
    {
      id: "dQ",
      depth: 2,
      code: `${dQi} ← ${dQi} + <i>c dS</i> ${Kj}`,
      why: {
        en: `dQ is a sum over keys, and keys are the outer loop. So each tile reads its part of dQ from memory, adds to it, and
          writes it back. The Hopper kernels of tilewise do the same; its portable kernels compute dQ in a second pass, with
          the loops exchanged.`,
        zh: `dQ 是对键求和，而键在外层循环，所以每一块都要从显存读出自己那部分 dQ，加上去，再写回来。tilewise 的 Hopper kernel
          也是这样做的；可移植的 kernel 则交换内外循环，另走一遍来算 dQ。`,
      },
      tell: (s, v, r) => firstEntry(s, "dQ", r, "query"),
    },
    {
      id: "dK",
      depth: 2,
      code: `${dKj} ← ${dKj} + <i>c dS</i>${T} ${Qi}`,
      why: {
        en: `The same as dQ with rows and columns exchanged, but this sum stays on the chip. After this line P and dS are
          discarded.`,
        zh: `与 dQ 的算法相同，只是行列互换，而且这个和留在片上。这一行之后，P 和 dS 就丢弃了。`,
      },
      tell: (s) => firstEntry(s, "dK", s.j0, "key"),
    },
    {
      id: "finish",
      depth: 1,
      code: { en: `write ${dKj}, ${dVj}`, zh: `写出 ${dKj}，${dVj}` },
      why: {
        en: `Every query that sees these keys is done, so the two sums are complete. They are written once.`,
        zh: `看得到这些键的查询都已处理完，两个和都完整了，只需写出这一次。`,
      },
      tell: (s) => ({
        en: `Rows ${s.j0} to ${s.j1 - 1} of dK and dV are done.`,
        zh: `dK 和 dV 的第 ${s.j0} 到 ${s.j1 - 1} 行已经完成。`,
      }),
    },
  ];

  /** From the smallest to the largest of a row's entries that are not hidden; empty if all are. */
  function range(entries) {
    const seen = [...entries].filter(Number.isFinite);
    if (seen.length === 0) return "";
    const [low, high] = [Math.min(...seen), Math.max(...seen)].map(number);
    return low === high ? low : `${low} … ${high}`;
  }

  /** How a step changed the first entry of a row, which is a row of the tile, a query, a key or a value. */
  function firstEntry(step, name, r, what) {
    const [before, after] = ["before", "after"].map((time) => number(row(step, name, r)[time][0]));
    const of = {
      row: { en: `Row ${r}`, zh: `第 ${r} 行` },
      query: { en: `Query ${r}`, zh: `查询 ${r}` },
      key: { en: `Key ${r}`, zh: `键 ${r}` },
      value: { en: `Value ${r}`, zh: `值 ${r}` },
    }[what];
    return {
      en: `${of.en}: the first entry of ${name} goes from ${before} to ${after}.`,
      zh: `${of.zh}：${name} 的第一个元素从 ${before} 变为 ${after}。`,
    };
  }

  const before = {
    forward: {
      en: "Nothing is computed yet. Q, K and V lie in memory; O and lse are what we want.",
      zh: "还没有开始计算。Q、K、V 在显存里，要求的是 O 和 lse。",
    },
    backward: {
      en: "The forward ran and left O and lse. The loss gave dO. Now dQ, dK and dV are wanted.",
      zh: "前向已经算完，留下了 O 和 lse；损失函数给出了 dO。现在要求的是 dQ、dK 和 dV。",
    },
  };

  // Everything else that the scripts write

  const words = {
    title: { en: "Attention, tile by tile", zh: "注意力，逐块演示" },
    other: { en: "中文", zh: "English" }, // the way to the other language
    begin: { en: "Step, or play, and watch one tile at a time.", zh: "单步执行或者播放，一次看一块。" },
    row: { en: "row", zh: "行" },
    play: { en: "Play (space)", zh: "播放（空格）" },
    pause: { en: "Pause (space)", zh: "暂停（空格）" },
    heatMaps: { en: "Heat maps of the matrices.", zh: "各个矩阵的热力图。" },
    oneTile: { en: "one tile of S at a time", zh: "每次只有一块 S" },
    scores: { en: "S, scores", zh: "S，分数" },
    weights: { en: "P, weights", zh: "P，权重" },
    missing: { en: "not there yet", zh: "尚未算出" },
    moved: (read, written) => ({
      en: `so far: ${read} read, ${written} written`,
      zh: `已搬运，其中读入 ${read}，写出 ${written}`,
    }),
    less: (all, times) => ({
      en: `In all the tiles move ${all}, ${times} times less.`,
      zh: `分块总共搬运 ${all}，标准注意力是它的 ${times} 倍。`,
    }),
    notLess: (all, outer) => ({
      en: `In all the tiles move ${all}, not less: try larger ${outer === "i" ? "query" : "key"} tiles.`,
      zh: `分块总共搬运 ${all}，并没有变少：请把${outer === "i" ? "查询" : "键"}块取大一些。`,
    }),
    brief: (moved, standard) => ({
      en: `${moved} moved; standard: ${standard}`,
      zh: `已搬运 ${moved}；标准注意力 ${standard}`,
    }),
    held: (now, most) => ({
      en: `On the chip now: ${now}; the most at any step: ${most}.`,
      zh: `片上现有 ${now}；最多的一步有 ${most}。`,
    }),
    notYet: { en: "not yet", zh: "未完成" },
    fault: (error) => ({ en: `They differ by ${error}: the page has a fault.`, zh: `两者相差 ${error}：这个页面有错误。` }),
    agree: {
      en: "✓ The tiles agree with the formula, computed row by row on its own.",
      zh: "✓ 分块的结果与逐行按公式算出的结果一致。",
    },
    largest: {
      en: "The largest difference among the results that are finished.",
      zh: "已完成的结果中，两者之差的最大值。",
    },
  };

  /** Names of what has no text to see, and tips for buttons, by id. */
  const labels = {
    settings: { en: "Settings", zh: "设置" },
    stage: { en: "The matrices", zh: "矩阵" },
    listing: { en: "The algorithm", zh: "算法" },
    scroll: { en: "Numbers of the rows", zh: "各行的数" },
    transport: { en: "Steps", zh: "步骤" },
    position: { en: "Step", zh: "步骤" },
    speed: { en: "Speed", zh: "速度" },
    rewind: { en: "To the start (Home)", zh: "回到开头（Home）" },
    back: { en: "One step back (←; with Shift: a tile)", zh: "后退一步（←；按住 Shift 则后退一块）" },
    step: { en: "One step (→; with Shift: a tile)", zh: "前进一步（→；按住 Shift 则前进一块）" },
    end: { en: "To the end (End)", zh: "到结尾（End）" },
  };

  return { backward, before, forward, labels, language, number, say, words };
})();
