// A list of which only the rows in view are in the page: there may be a hundred thousand.
import { useEffect, useRef, useState } from "preact/hooks";
import { useSize } from "./hooks.js";

const SPARE = 6; // rows above and below

export function List({ label, count, picked, height, row, pick, empty, className = "" }) {
  const box = useRef(null), size = useSize(box), [top, setTop] = useState(0);
  const first = Math.max(0, Math.floor(top / height) - SPARE);
  const last = Math.min(count, Math.ceil((top + (size.height || 400)) / height) + SPARE);
  useEffect(() => {
    const { current } = box, view = current.clientHeight;
    if (picked < 0 || !view) return;
    const at = picked * height;
    if (at < current.scrollTop + height) current.scrollTop = Math.max(0, at - height);
    else if (at + 2 * height > current.scrollTop + view) current.scrollTop = at + 2 * height - view;
  }, [picked, count, size.height > 0]);
  const rows = [];
  for (let i = first; i < last; i++)
    rows.push(
      <div key={i} id={`${label}-${i}`} role="option" aria-selected={i === picked} aria-posinset={i + 1} aria-setsize={count} class={`row ${i === picked ? "picked" : ""}`} style={{ top: `${i * height}px`, height: `${height}px` }} onClick={() => pick(i)}>
        {row(i)}
      </div>,
    );
  return (
    <div class={`list ${className}`} style={{ height: `${Math.max(count, 1) * height + 2}px` }} ref={box} onScroll={(event) => setTop(event.currentTarget.scrollTop)} role="listbox" aria-label={label} tabIndex={0} aria-activedescendant={picked >= first && picked < last ? `${label}-${picked}` : undefined}>
      <div role="presentation" style={{ height: `${count * height}px` }}>{rows}</div>
      {!count && <p class="faint" role="option" aria-selected="false">{empty}</p>}
    </div>
  );
}
