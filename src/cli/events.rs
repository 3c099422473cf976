//! `postern events`: the audit, as lines for a person or as the JSON lines they are.

use http::{HeaderMap, Method};
use policy::AuditRecord;
use policy::audit::Outcome;

use crate::cli::screen::Screen;
use crate::client::{Client, Content, query};
use crate::error::Error;

#[derive(Debug, clap::Args)]
pub(crate) struct Events {
    /// Go on with what is decided from now on.
    #[arg(long, short)]
    follow: bool,
    /// Of this sandbox.
    #[arg(long)]
    sandbox: Option<String>,
    /// Of this tenant.
    #[arg(long)]
    tenant: Option<String>,
    /// With this reason, e.g. no-rule.
    #[arg(long)]
    code: Option<String>,
    /// allow, observe, deny, fail or closed.
    #[arg(long)]
    outcome: Option<String>,
    /// dns, connection, request, frame, control or gap.
    #[arg(long)]
    kind: Option<String>,
    /// About this host name.
    #[arg(long)]
    name: Option<String>,
    /// That left from this address, or address:port.
    #[arg(long, value_name = "ADDRESS")]
    egress: Option<String>,
    /// Not older: RFC 3339, or how long ago as in 10m.
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Not newer: RFC 3339, or how long ago.
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// Only what an earlier answer said it had not looked at, in its words: 7-0.
    #[arg(long, value_name = "PLACE")]
    before: Option<String>,
    /// At most so many records of the past, the newest.
    #[arg(long, short = 'n', value_name = "N")]
    limit: Option<usize>,
}

impl Events {
    pub(crate) async fn run(self, client: &Client, screen: &Screen) -> Result<(), Error> {
        let path = format!("/v1/events?{}", self.query());
        let answer = client.send(Method::GET, &path, HeaderMap::new(), Content::Nothing).await?;
        let mut lines = answer.lines();
        while let Some(line) = lines.next().await? {
            match serde_json::from_str::<AuditRecord>(&line) {
                Ok(record) if !screen.is_json() => screen.line(told(&record, screen))?,
                _ => screen.line(line)?,
            }
        }
        Ok(())
    }

    fn query(&self) -> String {
        let limit = self.limit.map(|limit| limit.to_string());
        let follow = self.follow.then(|| "true".to_owned());
        let pairs = [
            ("follow", &follow),
            ("sandbox", &self.sandbox),
            ("tenant", &self.tenant),
            ("code", &self.code),
            ("outcome", &self.outcome),
            ("kind", &self.kind),
            ("name", &self.name),
            ("egress", &self.egress),
            ("since", &self.since),
            ("until", &self.until),
            ("before", &self.before),
            ("limit", &limit),
        ];
        query(&pairs)
    }
}

/// One record in one line: when, what, why, who, whereto, by which rule.
fn told(record: &AuditRecord, screen: &Screen) -> String {
    let time = serde_json::to_value(record).ok();
    let time = time.as_ref().and_then(|value| value.get("time")?.as_str()).unwrap_or_default();
    let outcome = match record.outcome {
        Outcome::Allow => screen.good("allow "),
        Outcome::Closed => "closed".to_owned(),
        Outcome::Observe => screen.doubtful("observe"),
        Outcome::Fail => screen.doubtful("fail  "),
        Outcome::Deny => screen.bad("deny  "),
    };
    let mut parts = vec![time.to_owned(), outcome];
    let mut add = |part: Option<String>| parts.extend(part);
    add(record.sandbox.as_ref().map(ToString::to_string));
    add(record.protocol.clone());
    add(record.method.clone());
    add(record.name.clone().or_else(|| record.destination.map(|to| to.to_string())));
    add(record.path.clone());
    add(record.code.map(|code| format!("[{code}]")));
    add(record.count.map(|count| format!("x{count}")));
    add(record.egress.map(|from| format!("from {from}")));
    add(record.dialed.map(|to| format!("to {to}")));
    add(record.bytes_out.map(|out| format!("{out} B out")));
    add(record.bytes_in.map(|bytes| format!("{bytes} B in")));
    add(record.rule.as_ref().map(|rule| format!("by {rule}")));
    add(record.detail.clone());
    parts.join(" ")
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use policy::Code;
    use policy::audit::Kind;

    use super::*;

    #[test]
    fn a_record_is_one_line_that_says_who_whereto_and_why() {
        let mut record = AuditRecord::new(SystemTime::UNIX_EPOCH, Kind::Connection, Outcome::Deny);
        record.sandbox = "demo".parse().ok();
        record.name = Some("gist.github.com".into());
        record.code = Some(Code::NoRule);
        record.count = Some(3);
        let line = told(&record, &Screen::new(true));
        assert_eq!(line, "1970-01-01T00:00:00.000000Z deny   demo gist.github.com [no-rule] x3");
    }

    #[test]
    fn a_query_carries_any_text_unharmed() {
        let one = |text: &str| query(&[("k", &Some(text.to_owned())), ("none", &None)]);
        assert_eq!(one("a-b_c.d~1"), "k=a-b_c.d~1");
        assert_eq!(one("[::1]:80&x=ü"), "k=%5B%3A%3A1%5D%3A80%26x%3D%C3%BC");
    }
}
