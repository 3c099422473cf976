//! What a guest is answered, as bytes: the question as it came, addresses under the question's own
//! name, and on a refusal the reason as an extended error (RFC 8914). Nothing an upstream wrote
//! passes but addresses: no CNAME, no hints, no `ech`. Pure.

use std::net::IpAddr;

use hickory_proto::op::{Edns, Message, Metadata, ResponseCode};
use hickory_proto::rr::rdata::opt::EdnsOption;
use hickory_proto::rr::rdata::{A, AAAA, SOA};
use hickory_proto::rr::{Name, RData, Record};
use policy::Code;

use crate::question::Question;

/// Largest answer over UDP, in bytes: fits every path without fragments (DNS flag day 2020).
pub(crate) const MAX_UDP: u16 = 1232;
/// How long a stub may remember a refusal, in seconds: short, because a policy changes.
const REFUSED_TTL: u32 = 5;
/// The extended error option (RFC 8914 section 2).
const EXTENDED_ERROR: u16 = 15;

/// Info codes of RFC 8914 section 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Info {
    Other = 0,
    Filtered = 17,
    NotSupported = 21,
    NoReachableAuthority = 22,
    NetworkError = 23,
}

/// An answer to one question.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    pub(crate) code: ResponseCode,
    /// The addresses told and their TTL in seconds.
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) ttl: u32,
    pub(crate) reason: Option<(Info, Code)>,
}

impl Reply {
    /// An answer without addresses.
    pub(crate) fn without(code: ResponseCode, reason: Option<(Info, Code)>) -> Self {
        Self { code, addresses: Vec::new(), ttl: 0, reason }
    }

    /// The answer's bytes, at most `limit`: with TC and without addresses when they do not fit.
    pub(crate) fn encode(&self, question: &Question, limit: usize) -> Option<Vec<u8>> {
        let mut message = answering(&question.metadata, self.code);
        let owner = &question.query.name;
        message.add_query(question.query.clone());
        message.add_answers(self.addresses.iter().map(|address| {
            let data = match *address {
                IpAddr::V4(v4) => RData::A(A(v4)),
                IpAddr::V6(v6) => RData::AAAA(AAAA(v6)),
            };
            Record::from_rdata(owner.clone(), self.ttl, data)
        }));
        let negative = matches!(self.code, ResponseCode::NXDomain | ResponseCode::NoError);
        if negative && self.addresses.is_empty() {
            message.add_authority(soa(owner));
        }
        if question.edns.is_some() {
            let mut edns = opt();
            if let Some((info, code)) = self.reason {
                let mut option = (info as u16).to_be_bytes().to_vec();
                option.extend_from_slice(b"postern:");
                option.extend_from_slice(code.as_str().as_bytes());
                edns.options_mut().insert(EdnsOption::Unknown(EXTENDED_ERROR, option));
            }
            message.set_edns(edns);
        }
        let bytes = message.to_vec().ok()?;
        if bytes.len() <= limit {
            return Some(bytes);
        }
        message.metadata.truncation = true;
        message.answers.clear();
        message.authorities.clear();
        message.to_vec().ok()
    }
}

/// The answer to bytes that are no question: a header, and an OPT where the code needs one.
pub(crate) fn unread(metadata: &Metadata, code: ResponseCode) -> Option<Vec<u8>> {
    let mut message = answering(metadata, code);
    let high = u16::from(code) >> 4;
    if let (1.., Ok(high)) = (high, u8::try_from(high)) {
        let mut edns = opt();
        edns.set_rcode_high(high);
        message.set_edns(edns);
    }
    message.to_vec().ok()
}

fn answering(asked: &Metadata, code: ResponseCode) -> Message {
    let mut message = Message::response(asked.id, asked.op_code);
    message.metadata.recursion_desired = asked.recursion_desired;
    message.metadata.checking_disabled = asked.checking_disabled;
    message.metadata.recursion_available = true;
    message.metadata.response_code = code;
    message
}

fn opt() -> Edns {
    let mut edns = Edns::new();
    edns.set_max_payload(MAX_UDP);
    edns
}

/// What makes a negative answer one that may be remembered (RFC 2308 section 3): as if the zone
/// began above the name. Its names are reserved (RFC 6761), so that nobody is pointed anywhere.
fn soa(owner: &Name) -> Record {
    let nobody = Name::from_labels(["postern", "invalid"].map(str::as_bytes)).unwrap_or_default();
    let ttl = REFUSED_TTL.cast_signed();
    let data = SOA::new(nobody.clone(), nobody, 1, ttl, ttl, ttl, REFUSED_TTL);
    Record::from_rdata(owner.base_name(), REFUSED_TTL, RData::SOA(data))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    use hickory_proto::op::Query;
    use hickory_proto::rr::RecordType;

    fn ask(edns: Option<u16>) -> Question {
        let mut message = Message::query();
        let name = Name::from_ascii("wWw.eXample.cOm.").expect("name");
        message.add_query(Query::query(name, RecordType::A));
        if let Some(size) = edns {
            let mut edns = opt();
            edns.set_max_payload(size);
            message.set_edns(edns);
        }
        Question::read(&message.to_vec().expect("bytes")).expect("readable")
    }

    fn told(n: u8) -> Reply {
        let addresses = (0..n).map(|n| IpAddr::from([192, 0, 2, n])).collect();
        Reply { code: ResponseCode::NoError, addresses, ttl: 60, reason: None }
    }

    #[test]
    fn letter_case_comes_back_as_it_came() {
        let bytes = told(1).encode(&ask(None), 512).expect("bytes");
        let at = |text: &[u8]| bytes.windows(text.len()).any(|window| window == text);
        assert!(at(b"\x03wWw\x07eXample\x03cOm\0"));
    }

    #[test]
    fn a_refusal_can_be_remembered_and_says_why_where_the_client_can_read_it() {
        let reply = Reply::without(ResponseCode::NXDomain, Some((Info::Filtered, Code::NoRule)));
        let with = Message::from_vec(&reply.encode(&ask(Some(4096)), 1232).expect("bytes"))
            .expect("message");
        let reason = with.edns.expect("OPT").option(EXTENDED_ERROR.into()).cloned();
        let expected = [&[0, 17][..], b"postern:no-rule"].concat();
        assert_eq!(reason, Some(EdnsOption::Unknown(EXTENDED_ERROR, expected)));
        let soa = &with.authorities[0];
        assert_eq!((soa.ttl, soa.name.to_ascii().to_lowercase()), (5, "example.com.".into()));

        let without =
            Message::from_vec(&reply.encode(&ask(None), 512).expect("bytes")).expect("message");
        assert_eq!(without.edns, None, "an OPT only for those who sent one (RFC 6891 6.1.1)");
        assert_eq!(without.authorities.len(), 1);
    }

    #[test]
    fn what_does_not_fit_is_cut_and_says_so() {
        let cut = told(32).encode(&ask(None), 512).expect("bytes");
        let message = Message::from_vec(&cut).expect("message");
        assert!(message.metadata.truncation && message.answers.is_empty() && cut.len() <= 512);
        let whole = told(32).encode(&ask(Some(1232)), 1232).expect("bytes");
        let message = Message::from_vec(&whole).expect("message");
        assert!(!message.metadata.truncation && message.answers.len() == 32);
    }

    proptest! {
        #[test]
        fn no_answer_is_longer_than_its_limit(n in 0..=32_u8, edns in proptest::option::of(any::<u16>()), limit in 512..1233_usize) {
            let bytes = told(n).encode(&ask(edns), limit).expect("bytes");
            prop_assert!(bytes.len() <= limit);
            let message = Message::from_vec(&bytes).expect("message");
            prop_assert_eq!(message.metadata.truncation, message.answers.len() != usize::from(n));
        }
    }
}
