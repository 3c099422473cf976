//! What a monitoring system reads, in the text format of OpenMetrics: how the node is, what was decided, what
//! tenants used. For the operator only.
//!
//! Labels are states, codes and tenants, never a name that a guest or a far side chose: those have no bound.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use lifecycle::usage::Amounts;
use policy::TenantName;
use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use serde::Serialize;
use serde_json::Value;

use crate::api::Api;
use crate::api::caller::Caller;
use crate::auditlog::Decision;
use crate::problem::{ErrorBody, Kind, Problem};
use crate::telemetry;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const MIB: f64 = 1_048_576.0;
const MILLIS: f64 = 1000.0;

type Labels = Vec<(&'static str, String)>;
type Sums = Family<Labels, Counter<f64, AtomicU64>>;

/// Numbers of the node, of decisions and of tenants, for a monitoring system.
#[utoipa::path(
    get, path = "/v1/metrics", tag = "node",
    responses(
        (status = 200, description = "OpenMetrics 1.0. Counters begin anew with the daemon.", body = String,
         content_type = "application/openmetrics-text"),
        (status = "default", description = "Refused.", body = ErrorBody),
    )
)]
pub(crate) async fn metrics(
    State(api): State<Api>,
    caller: Caller,
) -> Result<impl IntoResponse, Problem> {
    if !caller.is_operator() {
        return Err(Problem::new(Kind::Forbidden, "metrics are of all tenants")
            .fix("ask for `/v1/usage`, which tells what your own sandboxes used"));
    }
    let mut registry = Registry::with_prefix("postern");
    of_node(&api, &mut registry);
    of_decisions(api.0.audit.decided(), &mut registry);
    of_tenants(&api.0.keeper.totals().await, &mut registry);
    let mut told = String::new();
    text::encode(&mut told, &registry)
        .map_err(|_| Problem::new(Kind::Failed, "the metrics were not written"))?;
    Ok(([(header::CONTENT_TYPE, OPEN_METRICS)], told))
}

fn of_node(api: &Api, registry: &mut Registry) {
    let version = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
    registry.register("build", "What serves", version);
    let uptime = Gauge::<f64, AtomicU64>::default();
    uptime.set(api.0.started.elapsed().as_secs_f64());
    let help = "Since the daemon started";
    registry.register_with_unit("uptime", help, Unit::Seconds, uptime);
    let sandboxes = Family::<Labels, Gauge>::default();
    for sandbox in api.0.keeper.list(None) {
        let state = sandbox.state.as_str().to_owned();
        let labels = vec![("tenant", sandbox.tenant.to_string()), ("state", state)];
        sandboxes.get_or_create(&labels).inc();
    }
    registry.register("sandboxes", "Sandboxes that are there", sandboxes);
    let stuck = Gauge::<i64>::default();
    stuck.set(i64::try_from(api.0.keeper.stuck_slots()).unwrap_or(i64::MAX));
    registry.register("stuck_slots", "Slots that cannot be given to anybody", stuck);
    for (name, help, value) in [
        ("audit_lost", "Decisions whose records were lost", api.0.audit.dropped()),
        ("panics", "Tasks that ended by a fault of Postern's own", telemetry::panics()),
    ] {
        let counter = Counter::<u64>::default();
        counter.inc_by(value);
        registry.register(name, help, counter);
    }
}

fn of_decisions(decided: BTreeMap<Decision, u64>, registry: &mut Registry) {
    let decisions = Family::<Labels, Counter>::default();
    for ((kind, outcome, code), count) in decided {
        let mut labels = vec![("kind", word(&kind)), ("outcome", word(&outcome))];
        labels.extend(code.map(|code| ("code", code.as_str().to_owned())));
        decisions.get_or_create(&labels).inc_by(count);
    }
    registry.register("decisions", "What was recorded in the audit", decisions);
}

fn of_tenants(totals: &BTreeMap<TenantName, Amounts>, registry: &mut Registry) {
    // Exact: all are far below 2^53.
    #[expect(clippy::cast_precision_loss, reason = "milliseconds of many thousand years")]
    let number = |count: u64| count as f64;
    let seconds = |ms| number(ms) / MILLIS;
    let mut sums = |name, help, unit, told: &dyn Fn(&Amounts) -> Vec<(Labels, f64)>| {
        let family = Sums::default();
        for (tenant, amounts) in totals {
            for (mut labels, sum) in told(amounts) {
                labels.insert(0, ("tenant", tenant.to_string()));
                family.get_or_create(&labels).inc_by(sum);
            }
        }
        registry.register_with_unit(name, help, unit, family);
    };
    let one = |label: &'static str, value: &str| vec![(label, value.to_owned())];
    sums("sandbox", "Time of sandboxes, by how they passed it", Unit::Seconds, &|used| {
        vec![
            (one("phase", "running"), seconds(used.running_ms)),
            (one("phase", "standby"), seconds(used.standby_ms)),
            (one("phase", "suspended"), seconds(used.suspended_ms)),
            (one("phase", "other"), seconds(used.other_ms)),
        ]
    });
    sums("vcpu", "Virtual CPUs given, while running", Unit::Seconds, &|used| {
        vec![(Vec::new(), seconds(used.vcpu_ms))]
    });
    sums("cpu", "Processors of the node that microVMs had", Unit::Seconds, &|used| {
        vec![(Vec::new(), seconds(used.cpu_ms))]
    });
    let byte_seconds = || Unit::Other("byte_seconds".to_owned());
    sums("memory", "Memory times the time it was held", byte_seconds(), &|used| {
        vec![
            (one("of", "given"), seconds(used.memory_mib_ms) * MIB),
            (one("of", "resident"), seconds(used.resident_mib_ms) * MIB),
            (one("of", "saved"), seconds(used.saved_mib_ms) * MIB),
        ]
    });
    sums("payload", "Payload that passed", Unit::Bytes, &|used| {
        vec![
            (one("direction", "out"), number(used.bytes_out)),
            (one("direction", "in"), number(used.bytes_in)),
        ]
    });
}

/// The word for a value that is one, as JSON has it.
fn word(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(Value::String(word)) => word,
        _ => String::new(),
    }
}
