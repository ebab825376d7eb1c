// Numbers as Python prints them: the terminal and the page show the same digits.

/** x with so many decimals, as f"{x:.3f}": exact ties go to the even digit. */
export function fixed(x, decimals) {
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "nan" : x > 0 ? "inf" : "-inf";
  const scaled = Math.abs(x) * 10 ** decimals, below = Math.floor(scaled);
  if (scaled - below !== 0.5 || scaled / 10 ** decimals !== Math.abs(x)) return x.toFixed(decimals);
  return ((Math.sign(x) * (below + (below % 2))) / 10 ** decimals).toFixed(decimals);
}

/** [mantissa, exponent] with so many decimals of the mantissa. */
function scientific(x, decimals) {
  const [mantissa, exponent] = x.toExponential(decimals).split("e");
  return [mantissa, Number(exponent)];
}

const power = (mantissa, exponent) =>
  `${mantissa}e${exponent < 0 ? "-" : "+"}${String(Math.abs(exponent)).padStart(2, "0")}`;

/** As f"{x:.1e}". */
export const exponential = (x, decimals) => (Number.isFinite(x) ? power(...scientific(x, decimals)) : fixed(x, 0));

const trimmed = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

/** As f"{x:.4g}". */
export function general(x, digits) {
  if (!Number.isFinite(x)) return fixed(x, 0);
  if (x === 0) return "0";
  const [mantissa, exponent] = scientific(x, digits - 1);
  if (exponent < -4 || exponent >= digits) return power(trimmed(mantissa), exponent);
  return trimmed(fixed(x, digits - 1 - exponent));
}

/** A probability in at most five characters, never rounded to a 0 or 1 that it is not. */
export function probability(x) {
  if (!Number.isFinite(x)) return fixed(x, 0);
  if (x === 0 || x === 1) return String(x);
  if (x > 0 && x < 0.0005) return exponential(x, 0);
  return x >= 0.9995 && x < 1 ? ">.999" : fixed(x, 3);
}

export const count = (n) => n.toLocaleString("en-US");
export const percent = (x, decimals = 1) => (x == null ? "–" : `${fixed(100 * x, decimals)}%`);
export const number = (x, decimals = 2) => (x == null ? "–" : fixed(x, decimals));
export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

/** 1st, 12th, 1,022nd. */
export function ordinal(n) {
  const teen = n % 100 >= 11 && n % 100 <= 13;
  return count(n) + (teen ? "th" : ({ 1: "st", 2: "nd", 3: "rd" }[n % 10] ?? "th"));
}
