// What trees of other sizes would have accepted.
import { Curves } from "./charts.jsx";
import { Table } from "./table.jsx";

export function Tune({ run }) {
  const { tune } = run;
  if (!tune) return <main id="main" class="reading"><p>This run cannot tell what other trees would have accepted: that needs a drafter's tree with evidence.</p></main>;
  return (
    <main id="main" class="reading">
      <h2>Other trees</h2>
      <p class="strong">{tune.advice}</p>
      {Object.keys(tune.curves).length > 0 && <Curves curves={tune.curves} />}
      {tune.tables.map((table) => <Table table={table} run={run.number} />)}
      {tune.notes.map((line) => <p class="note">{line}</p>)}
    </main>
  );
}
