// Charts as SVG: a few hundred points at most, in the colours of the page, with a table of what they show beside them.
import { useRef } from "preact/hooks";
import { useSize } from "./hooks.js";
import { count, fixed, number, percent } from "./numbers.js";

const LEFT = 44, RIGHT = 12, TOP = 10, BOTTOM = 30;

/** Round numbers from 0 or `low` up to `high`, `least` or more apart. */
function ticks(low, high, most = 5, least = 0) {
  const step = 10 ** Math.floor(Math.log10((high - low || 1) / most));
  const size = Math.max(least, [1, 2, 5, 10].map((factor) => factor * step).find((each) => (high - low) / each <= most));
  const found = [];
  for (let value = Math.ceil(low / size) * size; value <= high + size / 1e6; value += size) found.push(value);
  return [found, Math.max(0, -Math.floor(Math.log10(size)))];
}

/** `legend`: [class of its square, what has this colour]. */
function Frame({ title, label, legend = [], height = 190, low, high, x, ys = fixed, children }) {
  const box = useRef(null), { width } = useSize(box), wide = Math.max(width, 200);
  const [values, decimals] = ticks(low, high), inner = { width: wide - LEFT - RIGHT, height: height - TOP - BOTTOM };
  const y = (value) => TOP + inner.height * (1 - (value - low) / (high - low || 1));
  return (
    <figure>
      <figcaption>{title}</figcaption>
      {legend.length > 0 && <ul class="legend">{legend.map(([kind, name]) => <li><svg class={kind} width={10} height={10} aria-hidden="true"><rect class="key" width={10} height={10} /></svg> {name}</li>)}</ul>}
      <div ref={box}>
        <svg viewBox={`0 0 ${wide} ${height}`} width={wide} height={height} role="img" aria-label={label}>
          {values.map((value) => [<line class="grid" x1={LEFT} x2={wide - RIGHT} y1={y(value)} y2={y(value)} />, <text x={LEFT - 6} y={y(value) + 4} text-anchor="end">{ys(value, decimals)}</text>])}
          {children({ inner, y, left: LEFT, wide, bottom: TOP + inner.height })}
          <text x={LEFT + inner.width / 2} y={height - 4} text-anchor="middle">{x}</text>
        </svg>
      </div>
    </figure>
  );
}

/** A chart without anything to draw. */
const Nothing = ({ title, why }) => <figure><figcaption>{title}</figcaption><p>{why}</p></figure>;

export function OverTime({ values, size }) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return null;
  const high = Math.max(...known);
  if (high <= 1) return <Nothing title="Acceptance length over time" why="It is 1 throughout: no draft was accepted." />;
  const label = `Mean acceptance length over the run, from ${number(known[0])} to ${number(known.at(-1))}, between ${number(Math.min(...known))} and ${number(high)}`;
  return (
    <Frame title="Acceptance length over time" label={label} low={1} high={Math.max(high, 1.5)} x={`engine steps, ${count(size)} a point`}>
      {({ inner, y, left, bottom }) => {
        const at = (i) => left + (inner.width * (i + 0.5)) / values.length, [marks] = ticks(0, (values.length - 1) * size, 5, 1);
        const path = values.map((value, i) => (value === null ? "" : `${i && values[i - 1] !== null ? "L" : "M"}${at(i)},${y(value)}`)).join("");
        return [
          <path class="line" d={path} />,
          values.length < 60 && values.map((value, i) => value !== null && <circle class="dot" cx={at(i)} cy={y(value)} r={2.5}><title>{`from step ${count(i * size)}: ${number(value)}`}</title></circle>),
          marks.map((step) => <text x={at(step / size)} y={bottom + 14} text-anchor="middle">{count(step)}</text>),
        ];
      }}
    </Frame>
  );
}

/** Bars beside each other: `groups` [name, values], `names` of the values; `lines`: intervals of the last. */
export function Bars({ title, groups, names, x }) {
  if (!groups.length) return null;
  if (!groups.some(([, values]) => values.some((value) => value > 0))) return <Nothing title={title} why="No draft was accepted at any depth." />;
  const label = `${title}: ${groups.map(([name, values]) => `${name}: ${values.map((value, i) => `${names[i]} ${percent(value)}`).join(", ")}`).join("; ")}`;
  return (
    <Frame title={title} label={label} legend={names.map((name, j) => [`bar${j}`, name])} low={0} high={1} x={x} ys={(value) => `${Math.round(100 * value)}%`}>
      {({ inner, y, left, bottom }) =>
        groups.map(([name, values], i) => {
          const room = inner.width / groups.length, bar = Math.min(26, (room * 0.8) / values.length), from = left + room * (i + 0.5) - (bar * values.length) / 2;
          return [
            values.map((value, j) => value !== null && <rect class={`bar${j}`} x={from + j * bar + 1} width={Math.max(1, bar - 2)} y={y(value)} height={bottom - y(value)}><title>{`${name}, ${names[j]}: ${percent(value)}`}</title></rect>),
            (groups.length < 20 || i % 5 === 0) && <text x={left + room * (i + 0.5)} y={bottom + 14} text-anchor="middle">{name}</text>,
          ];
        })}
    </Frame>
  );
}

/** Acceptance length by nodes; `curves` by name: [nodes, value, low, high, tree]. */
export function Curves({ curves }) {
  curves = Object.fromEntries(Object.entries(curves).map(([name, points]) => [name, points.map(([nodes, value, low, high, tree]) => [nodes, value, low ?? value, high ?? value, tree])]));
  const every = Object.values(curves).flat(), high = Math.max(...every.map((point) => point[3])), most = Math.max(...every.map(([nodes]) => nodes));
  if (high <= 1) return <Nothing title="Acceptance length by size of the tree" why="It is 1 for every tree: none of them would have had a draft accepted." />;
  const names = Object.keys(curves), label = names.map((name) => `${name}: up to ${number(Math.max(...curves[name].map((point) => point[1])))}`).join("; ");
  const legend = names.map((name, i) => [`curve${i}`, curves[name].length > 1 ? `best ${name} tree` : `${name}: ${curves[name][0][4]}`]);
  return (
    <Frame title="Acceptance length by size of the tree" label={label} legend={legend} height={260} low={1} high={high} x="nodes verified in a step">
      {({ inner, y, left, bottom }) => {
        const at = (nodes) => left + (inner.width * Math.log2(1 + nodes)) / Math.log2(1 + most);
        const marks = [1, 2, 4, 8, 16, 32, 64, 128].filter((nodes) => nodes <= most);
        return [
          marks.map((nodes) => <text x={at(nodes)} y={bottom + 14} text-anchor="middle">{nodes}</text>),
          names.map((name, i) => {
            const points = curves[name], up = points.map(([nodes, , , top]) => `${at(nodes)},${y(top)}`), down = points.map(([nodes, , low]) => `${at(nodes)},${y(low)}`);
            return (
              <g class={`curve${i}`}>
                {points.length > 1 && <polygon class="band" points={[...up, ...down.reverse()].join(" ")} />}
                {points.length > 1 && <polyline class="line" points={points.map(([nodes, value]) => `${at(nodes)},${y(value)}`).join(" ")} />}
                {points.map(([nodes, value, low, top, tree]) => <circle class="dot" cx={at(nodes)} cy={y(value)} r={points.length > 1 ? 2.5 : 6}><title>{`${name} ${tree}: ${number(value)} (${number(low)} to ${number(top)})`}</title></circle>)}
              </g>
            );
          }),
        ];
      }}
    </Frame>
  );
}

export function Phases({ phases }) {
  if (!phases.length) return null;
  const most = Math.max(...phases.map((phase) => phase[4] ?? 0)) || 1;
  return (
    <figure>
      <figcaption>The engine's phases</figcaption>
      <div class="scroll" tabIndex={0} role="group" aria-label="The engine's phases">
        <table>
          <thead><tr><th scope="col">phase</th><th scope="col" class="figure">steps</th><th scope="col" class="figure">median</th><th scope="col" class="figure">share</th><td class="wide" /></tr></thead>
          <tbody>
            {phases.map(([name, steps, median, , share]) => (
              <tr class={name.includes(",") ? "faint" : ""}>
                <th scope="row">{name}</th><td class="figure">{count(steps)}</td><td class="figure">{`${fixed(median, 2)} ms`}</td><td class="figure">{percent(share)}</td>
                <td class="wide"><div class="meter" style={{ width: `${(100 * (share ?? 0)) / most}%` }} /></td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </figure>
  );
}
