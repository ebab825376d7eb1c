// A table as report, compare and tune print it; what names a place is a link to it.
import { linkOf } from "./route.js";

const EXAMPLE = /^(example|where)/;

export function Reference({ name, run = 0 }) {
  const link = linkOf(name, run);
  return link ? <a href={link}>{name}</a> : name;
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
        <div class="scroll" tabIndex={0} role="group" aria-label={title}>
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
        </div>
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
