// Disk health: breaker, damage, errors, packs, and the store that hosts share.

import { api } from "../core/api.js";
import { fill, fillIfChanged, h } from "../core/dom.js";
import { bytes, count, dateTime, percent, plural, words } from "../core/format.js";
import { poll } from "../core/poll.js";
import { bar } from "../ui/charts.js";
import { badge, card, facts, pageHead } from "../ui/fields.js";
import { emptyState, showProblem } from "../ui/notices.js";
import { time } from "../ui/prompt_parts.js";
import { plainTable } from "../ui/table.js";

export const title = "Disk";

/** Counters that tell of trouble when they are not 0; a name may have tier and operation behind it. */
const TROUBLE = [
  ["damaged_chunks_disk", "Damaged chunks on disk"],
  ["damaged_chunks_host", "Damaged chunks in memory"],
  ["packs_set_aside", "Packs set aside"],
  ["io_errors", "Calls that the system refused"],
  ["pack_writes_failed_write_back", "Packs that could not be written"],
  ["pack_writes_failed_compaction", "Compactions that failed"],
  ["disk_breaker_opened", "Times the disk was switched off"],
  ["promotions_aborted_failed", "Promotions that failed"],
];
const WORK = [
  ["packs_written", "Packs written"],
  ["disk_written_bytes_write_back", "Bytes written", bytes],
  ["pack_fsyncs", "Fsyncs"],
  ["packs_compacted", "Packs compacted"],
  ["disk_written_bytes_compaction", "Bytes written by compaction", bytes],
  ["scrub_passes", "Passes of the scrub"],
  ["disk_read_bytes_scrub", "Bytes verified by the scrub", bytes],
];

export function show(root, { signal }) {
  const [problems, health, work, trouble, namespaces, remote] = Array.from({ length: 6 }, () => h("div"));
  for (const each of [health, work, trouble, namespaces, remote]) fill(each, h("div", { class: "waiting" }, "…"));
  const remoteCard = card("The store that hosts share", remote);
  fill(
    root,
    pageHead("Disk"),
    problems,
    h("div", { class: "grid grid-2" }, card("Health", health), card("Trouble since the start", trouble)),
    card("KV on disk, by namespace", namespaces),
    h("div", { class: "grid grid-2" }, card("Work since the start", work), remoteCard),
  );
  poll(
    async (asked) => {
      const status = await api.status({}, asked);
      fill(problems);
      showHealth(health, status);
      showTrouble(trouble, status.counters);
      showWork(work, status.counters);
      showNamespaces(namespaces, status.namespaces);
    },
    5,
    signal,
    (error) => showProblem(problems, error),
  );
  poll(
    async (asked) => showRemote(remote, await api.remote({}, asked)),
    15,
    signal,
    (error) => showProblem(remote, error),
  );
}

function showHealth(place, { disk, started_unix_s: started }) {
  place.className = "card-body";
  fillIfChanged(place, [disk, Math.floor(Date.now() / 60_000)], () => {
    const isOff = Boolean(disk.breaker_open_reason);
    const left = disk.limit_bytes - disk.used_bytes;
    return [
      h(
        "div",
        { class: "row" },
        badge(isOff ? "switched off" : "on", isOff ? "bad" : "good"),
        isOff
          ? h("span", {}, disk.breaker_open_reason)
          : h("span", { class: "muted" }, "reads and writes " + "go through"),
      ),
      isOff &&
        h(
          "p",
          { class: "hint" },
          "Requests are computed meanwhile. A probe switches the disk on again when it works. Look at the " +
            "events, at dmesg and at smartctl.",
        ),
      bar(
        [
          { value: disk.pinned_bytes, fill: "fill-device" },
          { value: Math.max(0, disk.used_bytes - disk.pinned_bytes), fill: "fill-soft" },
        ],
        disk.limit_bytes,
        `${percent(disk.used_bytes, disk.limit_bytes)} of the disk's limit is used`,
        "bar-tall",
      ),
      facts([
        [
          "Used",
          `${bytes(disk.used_bytes)} of ${bytes(disk.limit_bytes)}, ${percent(disk.used_bytes, disk.limit_bytes)}`,
        ],
        ["Pinned", bytes(disk.pinned_bytes)],
        ["Left", bytes(Math.max(0, left))],
        ["Chunks", count(disk.num_chunks)],
        ["Folder", h("code", {}, disk.location)],
        ["Daemon started", time(started)],
      ]),
    ];
  });
}

function showTrouble(place, counters) {
  place.className = "";
  const rows = TROUBLE.flatMap(([stem, name]) =>
    Object.entries(counters)
      .filter(([key, value]) => value > 0 && key.startsWith(stem))
      .map(([key, value]) => [key === stem ? name : `${name}: ${words(key.slice(stem.length + 1))}`, value]),
  );
  fillIfChanged(place, rows, () =>
    rows.length
      ? plainTable(
          "Trouble",
          ["What", "Times"],
          rows.map(([name, value]) => [name, count(value)]),
        )
      : emptyState(
          "None",
          h("p", {}, "No damaged chunk, no refused call, no pack set aside. The scrub reads everything once a day."),
        ),
  );
}

function showWork(place, counters) {
  place.className = "card-body";
  const rows = WORK.filter(([key]) => key in counters).map(([key, name, shown = count]) => [
    name,
    shown(counters[key]),
  ]);
  fillIfChanged(place, rows, () => (rows.length ? facts(rows) : h("p", { class: "muted" }, "Nothing yet.")));
}

function showNamespaces(place, namespaces) {
  place.className = "";
  fillIfChanged(place, namespaces, () =>
    namespaces.length === 0
      ? emptyState(
          "No namespace yet",
          h("p", {}, "The first vLLM that attaches makes one: its model, dtype and layout."),
        )
      : plainTable(
          "Namespaces",
          ["Model", "Namespace", "On disk", "Chunks on disk", "In host memory", "A chunk", "State"],
          namespaces.map((each) => [
            each.model,
            h("code", { title: each.namespace_id }, each.namespace_id.slice(0, 12)),
            bytes(each.disk_bytes),
            count(each.num_disk_chunks),
            count(each.num_host_chunks),
            bytes(each.row_bytes),
            each.quarantine_reason
              ? h(
                  "span",
                  { title: `${each.quarantine_reason}, since ${dateTime(each.quarantined_unix_s)}` },
                  badge("quarantined", "bad"),
                )
              : each.live
                ? badge("engine attached", "good")
                : badge("no engine"),
          ]),
        ),
  );
}

function showRemote(place, remote) {
  place.className = remote.url ? "card-body" : "";
  fillIfChanged(place, remote, () =>
    !remote.url
      ? emptyState(
          "This host shares no store",
          h("p", {}, "With remote.url in the daemon's settings, hosts share pins and KV in an object store."),
        )
      : [
          h(
            "div",
            { class: "row" },
            badge(remote.problem ? "cannot be used" : "in use", remote.problem ? "bad" : "good"),
            remote.problem && h("span", {}, remote.problem),
          ),
          facts([
            ["Address", h("code", {}, remote.url)],
            ["This host", remote.host],
            ["Pins", `${count(remote.num_pins)}, ${count(remote.num_waiting_pins)} wait`],
            ["KV", `${plural(remote.num_kv_objects, "object")}, ${bytes(remote.kv_bytes)}`],
            ["Uploaded, restored", `${count(remote.num_uploaded)}, ${count(remote.num_restored)}`],
            ["Looked at", time(remote.looked_unix_s)],
            ["Clock ahead", `${remote.clock_offset_s.toFixed(1)} s`],
            [
              "Requests",
              count(
                remote.spending.num_reads +
                  remote.spending.num_writes +
                  remote.spending.num_lists +
                  remote.spending.num_deletes,
              ),
            ],
            ["Cost", `$${remote.spending.dollars.toFixed(2)}`],
          ]),
          remote.refused.length > 0 &&
            plainTable(
              "Pins that cannot be taken",
              ["Pin", "Why"],
              remote.refused.map((each) => [each.name, each.why]),
            ),
        ],
  );
}
