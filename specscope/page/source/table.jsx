// A table as report, compare and tune print it; what names a place is a link to it.
import { useRef } from "preact/hooks";
import { useSize } from "./hooks.js";
import { linkOf } from "./route.js";

const EXAMPLE = /^(example|where)/;

export function Reference({ name, run = 0 }) {
  const link = linkOf(name, run);
  return link ? <a href={link}>{name}</a> : name;
}

/** A sentence whose numbers stay on a line: 7e-05. */
export const Sentence = ({ text }) => text.split(/(\d+e-\d+)/).map((part, i) => (i % 2 ? <span class="whole">{part}</span> : part));

/** What may be wider than its place: it scrolls sideways, and says so where it does. */
export function Scroll({ label, children, className = "" }) {
  const box = useRef(null), { width } = useSize(box);
  return [
    <div class={`scroll ${className}`} ref={box} tabIndex={0} role="group" aria-label={label}>{children}</div>,
    width > 0 && box.current.scrollWidth > box.current.clientWidth && <p class="note">→ wider than the page: scroll sideways</p>,
  ];
}

function Cell({ text, column, run }) {
  if (!EXAMPLE.test(column)) return text;
  if (!column.includes("A / B")) return <Reference name={text} run={run} />;
  const sides = text.split(" / ");
  return sides.length === 2 ? [<Reference name={sides[0]} run={0} />, " / ", <Reference name={sides[1]} run={1} />] : text;
}

export function Table({ table, run = 0, level: Heading = "h3" }) {
  const { title, columns, rows, note, words } = table, headed = columns.some(Boolean);
  return (
    <section class="table">
      {title && <Heading>{title}</Heading>}
      {rows.length > 0 && (
        <Scroll label={title}>
          <table>
            <thead class={headed ? "" : "hidden"}>
              <tr>{columns.map((column, i) => (column ? <th scope="col" class={words[i] ? "" : "figure"}>{column}</th> : <td />))}</tr>
            </thead>
            <tbody>
              {rows.map((row) => (
                <tr>{row.map((text, i) => <td class={words[i] ? "" : "figure"}><Cell text={text} column={columns[i]} run={run} /></td>)}</tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
      {note && <p class="note">{note}</p>}
    </section>
  );
}

/** (name, value) pairs. */
export const Facts = ({ pairs }) => (
  <dl class="facts">
    {pairs.map(([name, value]) => [<dt>{name || "\u00a0"}</dt>, <dd>{value}</dd>])}
  </dl>
);
