// Draws the charts of a report with uPlot. The data stand in the page as JSON.
(() => {
  "use strict";

  const charts = JSON.parse(document.getElementById("chart-data").textContent);
  const font = "12px system-ui, sans-serif";
  const colorOf = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue(`--chart-${name}`).trim();
  const textColor = () =>
    getComputedStyle(document.documentElement).getPropertyValue("--muted").trim();

  const short = (value) => {
    for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(value) >= size) return `${+(value / size).toPrecision(4)}${unit}`;
    }
    return `${+value.toPrecision(4)}`;
  };
  const formats = {
    loss: (value) => value.toFixed(4),
    rate: (value) => Math.round(value).toLocaleString("en"),
    small: (value) => value.toExponential(2),
    size: (value) => `${+value.toPrecision(4)}`,
  };
  const ticks = { loss: short, rate: short, size: short, small: (v) => (v ? v.toExponential(1) : "0") };

  const lastOf = (values) => values.findLast((value) => value != null);

  const seriesOptions = (series, values, format) => {
    const color = colorOf(series.look === "faint" ? "faint" : series.color);
    const options = {
      label: series.label,
      stroke: color,
      width: 2,
      spanGaps: false,
      points: { show: false },
      value: (_, value) => {
        const shown = value ?? lastOf(values);
        return shown == null ? "none" : formats[format](shown);
      },
    };
    if (series.look === "faint") options.width = 1;
    if (series.look === "points") options.points = { show: true, size: 8, fill: color };
    if (series.look === "level") {
      options.width = 1.5;
      options.dash = series.color === "level-1" ? [8, 5] : [2, 4];
    }
    if (values.filter((value) => value != null).length === 1) {
      options.points = { show: true, size: 8, fill: color };
    }
    return options;
  };

  // Writes the name of every level on its line, at the right end.
  const drawLevelNames = (chart) => (plot) => {
    const ratio = devicePixelRatio || 1;
    plot.ctx.save();
    plot.ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    plot.ctx.textAlign = "right";
    plot.ctx.textBaseline = "bottom";
    chart.series.forEach((series, i) => {
      if (series.look !== "level" || !plot.series[i + 1].show) return;
      const { left, top, width, height } = plot.bbox;
      const y = plot.valToPos(series.y[0], "y", true);
      if (y < top || y > top + height) return;
      plot.ctx.fillStyle = colorOf(series.color);
      plot.ctx.fillText(series.label, left + width - 6 * ratio, y - 3 * ratio);
    });
    plot.ctx.restore();
  };

  const draw = (chart) => {
    const element = document.getElementById(`chart-${chart.id}`);
    const data = uPlot.join(chart.series.map((series) => [series.x, series.y]));
    const axis = {
      stroke: textColor,
      font,
      grid: { stroke: () => colorOf("grid"), width: 1 },
      ticks: { stroke: () => colorOf("grid"), width: 1 },
    };
    const size = () => ({ width: element.clientWidth, height: chart.id === "loss" ? 340 : 200 });
    const plot = new uPlot(
      {
        ...size(),
        scales: { x: { time: false } },
        legend: { markers: { width: 0, fill: (plot, i) => plot.series[i].stroke(plot, i) } },
        cursor: { sync: { key: "steps" }, points: { size: 7 } },
        axes: [
          { ...axis, size: 34, incrs: [1, 2, 5].flatMap((n) => [...Array(8).keys()].map((p) => n * 10 ** p)).sort((a, b) => a - b),
            values: (_, splits) => splits.map((value) => short(value)) },
          { ...axis, size: 60, values: (_, splits) => splits.map((value) => ticks[chart.format](value)) },
        ],
        series: [
          { label: "step", value: (_, value) => (value ?? lastOf(data[0])).toLocaleString("en") },
          ...chart.series.map((series, i) => seriesOptions(series, data[i + 1], chart.format)),
        ],
        hooks: { draw: [drawLevelNames(chart)] },
      },
      data,
      element,
    );
    return { plot, element, size };
  };

  let drawn = charts.map(draw);
  const widths = new ResizeObserver(() => {
    for (const { plot, element, size } of drawn) {
      if (element.clientWidth !== plot.width) plot.setSize(size());
    }
  });
  for (const { element } of drawn) widths.observe(element);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const { plot } of drawn) plot.destroy();
    drawn = charts.map(draw);
  });
})();
