//! What sandboxes have used, over HTTP: to each tenant its own, and never what is another's.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::extract::State;
use axum::http::Uri;
use lifecycle::usage::{By, Query, To, Used};

use crate::api::caller::Caller;
use crate::api::events::{choice, moment};
use crate::api::sandboxes::rfc3339;
use crate::api::{Api, body, label};
use crate::problem::{ErrorBody, Kind, Problem};
use crate::wire;

/// The most rows in one answer.
const MOST: usize = 20_000;
const HOUR: u64 = 3600;
const DAY: Duration = Duration::from_secs(24 * HOUR);
const MILLIS: f64 = 1000.0;

const KEYS: &[&str] = &["from", "to", "tenant", "sandbox", "by", "destinations"];

/// What sandboxes have used until now, those that are gone among them, in whole hours of UTC.
#[utoipa::path(
    get, path = "/v1/usage", tag = "usage",
    params(
        ("from" = Option<String>, Query, description = "RFC 3339, or how long ago: `30d`; a day ago if not given. The hour in which it is counts."),
        ("to" = Option<String>, Query, description = "Likewise; now if not given. The hour in which it is counts."),
        ("tenant" = Option<String>, Query, description = "Of this tenant."),
        ("sandbox" = Option<String>, Query, description = "Of sandboxes of this name."),
        ("by" = Option<String>, Query, description = "What there is a row for: `sandbox` (if not given), `tenant` or `hour`."),
        ("destinations" = Option<bool>, Query, description = "Tell bytes by destination, too."),
    ),
    responses(
        (status = 200, description = "At most 20,000 rows.", body = wire::Usage),
        (status = "default", description = "Refused.", body = ErrorBody),
    )
)]
pub(crate) async fn usage(
    State(api): State<Api>,
    caller: Caller,
    uri: Uri,
) -> Result<Json<wire::Usage>, Problem> {
    let query = read(&uri, &caller, fault::wall_clock())?;
    let place = api.0.door.place_to_ask(&caller)?;
    let keeper = api.0.keeper.clone();
    // To its end, whoever waits for it: whoever goes away and asks again has one question under way.
    let asked = tokio::spawn({
        let query = query.clone();
        async move {
            let used = keeper.used(&query).await;
            drop(place);
            used
        }
    });
    let used = asked.await.map_err(|_| Problem::new(Kind::Failed, "the accounts were not read"))?;
    let used = used.map_err(|error| caller.told(error))?;
    let rows = used.ok_or_else(|| {
        Problem::new(Kind::Invalid, format!("has more than {MOST} rows, or 200000 destinations"))
            .fix("ask for a shorter span, one tenant or sandbox, another `by`, or no destinations")
    })?;
    Ok(Json(wire::Usage {
        from: at(query.from),
        to: at(query.to),
        rows: rows.into_iter().map(shown).collect(),
    }))
}

fn read(uri: &Uri, caller: &Caller, now: SystemTime) -> Result<Query, Problem> {
    let (mut from, mut to) = (now.checked_sub(DAY).unwrap_or(UNIX_EPOCH), now);
    let mut query = Query {
        tenant: None,
        sandbox: None,
        from: 0,
        to: 0,
        by: By::default(),
        destinations: false,
        most: MOST,
    };
    for (key, value) in body::query(uri, KEYS)? {
        match key.as_str() {
            "from" => from = moment(&key, &value, now)?,
            "to" => to = moment(&key, &value, now)?,
            "tenant" => query.tenant = Some(label(&key, &value)?),
            "sandbox" => query.sandbox = Some(label(&key, &value)?),
            "destinations" => query.destinations = body::flag(&key, &value)?,
            _ => {
                query.by = match choice(&key, &value, ["sandbox", "tenant", "hour"])? {
                    wire::UsageBy::Sandbox => By::Sandbox,
                    wire::UsageBy::Tenant => By::Tenant,
                    wire::UsageBy::Hour => By::Hour,
                };
            }
        }
    }
    if let Some(own) = caller.tenant() {
        if query.tenant.as_ref().is_some_and(|tenant| tenant != own) {
            return Err(Problem::invalid("tenant", "", "is not this token's tenant")
                .fix("leave it out")
                .of(Kind::Forbidden));
        }
        query.tenant = Some(own.clone());
    }
    let seconds = |time: SystemTime| time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    (query.from, query.to) = (seconds(from) / HOUR, seconds(to).div_ceil(HOUR));
    if query.from >= query.to {
        return Err(Problem::invalid("from", &at(query.from), "is not before `to`")
            .fix("give an earlier one, or a later `to`"));
    }
    Ok(query)
}

/// An hour since 1970, by its beginning.
fn at(hour: u64) -> String {
    let since = Duration::from_secs(hour.saturating_mul(HOUR));
    UNIX_EPOCH.checked_add(since).and_then(rfc3339).unwrap_or_default()
}

fn shown(used: Used) -> wire::Used {
    let amounts = used.amounts;
    // Exact: all are far below 2^53.
    #[expect(clippy::cast_precision_loss, reason = "milliseconds of many thousand years")]
    let seconds = |ms: u64| ms as f64 / MILLIS;
    wire::Used {
        hour: used.hour.map(at),
        tenant: used.tenant,
        sandbox: used.sandbox,
        running_seconds: seconds(amounts.running_ms),
        standby_seconds: seconds(amounts.standby_ms),
        suspended_seconds: seconds(amounts.suspended_ms),
        other_seconds: seconds(amounts.other_ms),
        vcpu_seconds: seconds(amounts.vcpu_ms),
        cpu_seconds: seconds(amounts.cpu_ms),
        memory_mib_seconds: seconds(amounts.memory_mib_ms),
        resident_mib_seconds: seconds(amounts.resident_mib_ms),
        resident_mean_mib: amounts.resident_mib_ms.checked_div(amounts.running_ms).unwrap_or(0),
        resident_peak_mib: amounts.resident_peak_mib,
        saved_mib_seconds: seconds(amounts.saved_mib_ms),
        bytes_out: amounts.bytes_out,
        bytes_in: amounts.bytes_in,
        destinations: used.destinations.into_iter().map(carried).collect(),
    }
}

fn carried(to: To) -> wire::Carried {
    wire::Carried { to: to.to, bytes_out: to.bytes_out, bytes_in: to.bytes_in }
}
