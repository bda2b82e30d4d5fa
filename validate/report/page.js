"use strict";
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const wide = matchMedia("(min-width: 561px)");
  const wantsDark = matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Set();
  let chosen = null;
  try { chosen = localStorage.getItem("twinserve-theme"); } catch { /* a file:// page may have no storage */ }

  const setTheme = (name) => { root.dataset.theme = name; };
  setTheme(chosen || (wantsDark.matches ? "dark" : "light"));

  /* Colours are tokens ("$blue"), so that one figure serves every theme. */
  function coloured(value, style) {
    if (typeof value === "string") return /^\$[a-z-]+$/.test(value) ? style.getPropertyValue("--" + value.slice(1)).trim() : value;
    if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map((item) => coloured(item, style));
    if (value && typeof value === "object") {
      if (value.bdata) return value;
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item, style)]));
    }
    return value;
  }

  function layoutOf(figure, style, width, printing) {
    const narrow = width < 520;
    const ink = style.getPropertyValue("--ink").trim(), soft = style.getPropertyValue("--soft").trim();
    const grid = style.getPropertyValue("--grid").trim(), panel = style.getPropertyValue("--panel").trim();
    const layout = coloured(structuredClone(figure.layout), style);
    const horizontal = figure.data.every((trace) => trace.type === "bar");
    for (const key of Object.keys(layout)) {
      if (!/^[xy]axis/.test(key)) continue;
      layout[key] = { gridcolor: grid, linecolor: grid, zerolinecolor: grid, tickcolor: grid, automargin: true, fixedrange: narrow, ...layout[key] };
      if (narrow && layout[key].title) layout[key].title.font = { size: 11, color: soft };
    }
    return {
      autosize: false, width, height: narrow && !figure.wide ? Math.min(figure.height, 310) : figure.height,
      margin: { l: narrow ? 46 : 58, r: narrow ? 12 : 18, t: 8, b: 40 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", barcornerradius: 3,
      font: { family: getComputedStyle(document.body).fontFamily, size: narrow || printing ? 11 : 12, color: soft },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", xanchor: "left", font: { color: ink }, traceorder: "normal", bgcolor: "rgba(0,0,0,0)" },
      hoverlabel: { bgcolor: panel, bordercolor: grid, font: { color: ink, family: getComputedStyle(document.body).fontFamily } },
      hovermode: "closest", dragmode: narrow || horizontal ? false : "zoom", ...layout,
    };
  }

  function draw(figure, width = null) {
    const box = document.getElementById("plot-" + figure.key);
    const style = getComputedStyle(root);
    const layout = layoutOf(figure, style, width || box.clientWidth, width !== null);
    box.style.height = layout.height + "px";
    const config = { displaylogo: false, displayModeBar: false, responsive: false };
    drawn.add(figure.key);
    return Plotly.react(box, coloured(figure.data, style), layout, config);
  }

  async function unpack() {
    const element = document.getElementById("plotly");
    const packed = atob(element.textContent.trim());
    const bytes = new Uint8Array(packed.length);
    for (let i = 0; i < bytes.length; i++) bytes[i] = packed.charCodeAt(i);  // 0.1 s sooner than Uint8Array.from
    element.remove();
    const text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    const script = document.createElement("script");
    script.textContent = text;
    document.head.append(script);
  }

  function redraw() { for (const figure of figures) if (drawn.has(figure.key)) draw(figure); }

  function toggle() {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    setTheme(chosen);
    try { localStorage.setItem("twinserve-theme", chosen); } catch { /* then the choice lasts as long as the page */ }
    redraw();
  }

  function watch() {
    let last = innerWidth, pending = 0;
    addEventListener("resize", () => {
      cancelAnimationFrame(pending);
      if (innerWidth !== last) pending = requestAnimationFrame(() => { last = innerWidth; redraw(); });
    });
    wantsDark.addEventListener("change", (event) => { if (!chosen) { setTheme(event.matches ? "dark" : "light"); redraw(); } });
    /* On paper every figure is light and as wide as its column of an A4 page. */
    let before = null;
    addEventListener("beforeprint", () => {
      before = root.dataset.theme;
      setTheme("light");
      for (const figure of figures) draw(figure, figure.wide ? 660 : 322);
    });
    addEventListener("afterprint", () => { if (before) setTheme(before); before = null; redraw(); });
  }

  async function start() {
    document.getElementById("theme").addEventListener("click", toggle);
    try {
      await unpack();
    } catch (error) {
      for (const box of document.querySelectorAll(".plot")) box.innerHTML = '<p class="failed">This browser is too old to unpack the charts; the figures and tables above are complete.</p>';
      return;
    }
    watch();
    /* What is on the screen first; the rest when the browser has time, so that printing finds it drawn. */
    const near = (figure) => document.getElementById("plot-" + figure.key).getBoundingClientRect().top < innerHeight * 1.3;
    for (const figure of figures.filter(near)) draw(figure);
    performance.mark("twinserve-ready");
    root.dataset.ready = "first";
    const later = window.requestIdleCallback || ((work) => setTimeout(work, 30));
    const rest = figures.filter((figure) => !drawn.has(figure.key));
    const next = () => {
      const figure = rest.shift();
      if (!figure) { performance.mark("twinserve-all"); root.dataset.ready = "all"; return; }
      if (!drawn.has(figure.key)) draw(figure);
      later(next);
    };
    later(next);
  }
  start();
})();
