//! What was measured, as rows: medians, the ratio to the best peer, the goal and whether it is met.
//! Written for people as a table and for programs as JSON. Never changes a figure.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};
use serde_json::{Value, json};

/// Which way is better.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Better {
    Lower,
    Higher,
}

/// What was set as a goal before measuring.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Goal {
    /// Ours divided by the best peer is at most this.
    RatioAtMost(f64),
    /// Ours divided by the best peer is at least this.
    RatioAtLeast(f64),
    /// Ours, in the row's unit, is at most this.
    AtMost(f64),
    /// None: the figure is told, not judged.
    None,
}

/// One figure of ours beside those of the peers.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    name: String,
    unit: &'static str,
    better: Better,
    goal: Goal,
    ours: f64,
    peers: BTreeMap<&'static str, f64>,
    conditions: String,
}

impl Row {
    /// A row with the median of `ours`.
    pub(crate) fn new(
        name: impl Into<String>,
        unit: &'static str,
        better: Better,
        ours: &[f64],
    ) -> Self {
        Self {
            name: name.into(),
            unit,
            better,
            goal: Goal::None,
            ours: median(ours),
            peers: BTreeMap::new(),
            conditions: String::new(),
        }
    }

    /// The median of a peer.
    pub(crate) fn peer(mut self, name: &'static str, samples: &[f64]) -> Self {
        self.peers.insert(name, median(samples));
        self
    }

    pub(crate) fn goal(mut self, goal: Goal) -> Self {
        self.goal = goal;
        self
    }

    pub(crate) fn under(mut self, conditions: impl Into<String>) -> Self {
        self.conditions = conditions.into();
        self
    }

    fn ratio(&self) -> Option<f64> {
        let figures = self.peers.values().copied();
        let best = match self.better {
            Better::Lower => figures.reduce(f64::min),
            Better::Higher => figures.reduce(f64::max),
        };
        best.filter(|best| *best > 0.0).map(|best| self.ours / best)
    }

    fn met(&self) -> Option<bool> {
        match self.goal {
            Goal::RatioAtMost(limit) => self.ratio().map(|ratio| ratio <= limit),
            Goal::RatioAtLeast(limit) => self.ratio().map(|ratio| ratio >= limit),
            Goal::AtMost(limit) => Some(self.ours <= limit),
            Goal::None => None,
        }
    }

    fn json(&self) -> Value {
        let goal = match self.goal {
            Goal::RatioAtMost(limit) => format!("ratio <= {limit}"),
            Goal::RatioAtLeast(limit) => format!("ratio >= {limit}"),
            Goal::AtMost(limit) => format!("<= {limit} {}", self.unit),
            Goal::None => String::new(),
        };
        let better = match self.better {
            Better::Lower => "lower",
            Better::Higher => "higher",
        };
        json!({
            "name": self.name, "unit": self.unit, "ours": self.ours, "peers": self.peers,
            "ratio": self.ratio(), "better": better, "goal": goal, "met": self.met(),
            "conditions": self.conditions,
        })
    }
}

/// The middle of these figures.
pub(crate) fn median(samples: &[f64]) -> f64 {
    quantile(samples, 0.5)
}

/// The figure below which this share of them lies, by nearest rank; NaN of none.
pub(crate) fn quantile(samples: &[f64], share: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let below = sorted.iter().enumerate().rev();
    let rank = |at: usize| (at as f64 + 0.5) / sorted.len() as f64;
    let found = below.map(|(at, one)| (rank(at), *one)).find(|(rank, _)| *rank <= share);
    found.map(|(_, one)| one).or(sorted.first().copied()).unwrap_or(f64::NAN)
}

/// Prints the rows of one bench and keeps them in `target/bench/<name>.json`.
pub(crate) fn keep(name: &str, rows: &[Row]) {
    let rows: Vec<Value> = rows.iter().map(Row::json).collect();
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(HEADER);
    for row in &rows {
        table.add_row(cells(row));
    }
    println!("{table}");
    let folder = folder();
    std::fs::create_dir_all(&folder).expect("the folder of results");
    let text = serde_json::to_string_pretty(&rows).expect("JSON");
    std::fs::write(folder.join(format!("{name}.json")), text).expect("write the results");
}

const HEADER: [&str; 7] = ["what", "unit", "ours", "peers", "ratio", "goal", "met"];

fn cells(row: &Value) -> [String; 7] {
    let text = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
    let peers = row["peers"].as_object().into_iter().flatten();
    let peers: Vec<String> = peers.map(|(name, of)| format!("{name} {}", figure(of))).collect();
    let ratio = row["ratio"].as_f64().map(|ratio| format!("{ratio:.2}"));
    let met = match row["met"].as_bool() {
        Some(true) => "yes",
        Some(false) => "NO",
        None => "",
    };
    let [name, unit, goal] = ["name", "unit", "goal"].map(text);
    let ours = figure(&row["ours"]);
    [name, unit, ours, peers.join(", "), ratio.unwrap_or_default(), goal, met.to_owned()]
}

/// Three digits that matter.
fn figure(value: &Value) -> String {
    let Some(value) = value.as_f64() else { return "-".to_owned() };
    match value.abs() {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        1.0.. => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// Writes `docs/benchmarks.md` from all results that there are, in this order.
pub(crate) fn publish(names: &[(&str, &str)], versions: &[(String, String)]) {
    let mut text = String::from(
        "# Benchmarks\n\n\
         Written by `make bench`; one of them alone: `make bench-<name>`. Ours and the peers run in one run, in turns, on the same work in the\n\
         same kind of network namespaces, and each figure is the median of the rounds. `ratio` is ours divided by the best peer, and it is the claim;\n\
         absolute figures describe one machine at one time. The goals are the design's, but for two that decision 17 gives reasons for; where one is not met, `NO` says so.\n\n\
         ## Versions and machine\n\n",
    );
    for (what, version) in versions {
        text += &format!("* {what}: {version}\n");
    }
    for (name, about) in names {
        let Ok(kept) = std::fs::read_to_string(folder().join(format!("{name}.json"))) else {
            continue;
        };
        let rows: Vec<Value> = serde_json::from_str(&kept).expect("our own JSON");
        text += &format!("\n## `make bench-{name}`\n\n{about}\n\n| {} |\n", HEADER.join(" | "));
        text += &format!("|{}\n", "---|".repeat(HEADER.len()));
        for row in &rows {
            text += &format!("| {} |\n", cells(row).join(" | "));
        }
        let mut told = Vec::new();
        for row in &rows {
            let conditions = row["conditions"].as_str().unwrap_or_default();
            if !conditions.is_empty() && !told.contains(&conditions) {
                told.push(conditions);
                text += &format!("\n{conditions}\n");
            }
        }
    }
    std::fs::write(Path::new("docs/benchmarks.md"), text).expect("write docs/benchmarks.md");
}

fn folder() -> PathBuf {
    PathBuf::from("target/bench")
}
