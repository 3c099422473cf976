//! A guest's bytes read as one question (RFC 1035 section 4, RFC 6891), or refused before anybody
//! looks at the name. Pure; everything here is the guest's and hostile.

use hickory_proto::op::{
    Edns, Header, Message, MessageType, Metadata, OpCode, Query, ResponseCode,
};
use hickory_proto::rr::{DNSClass, Name, RecordType};
use hickory_proto::serialize::binary::BinDecodable;
use policy::Host;

/// Longest query that is read, in bytes. One question with options needs a quarter of it.
pub const MAX_QUERY: usize = 1232;

/// One question, readable, about the internet class.
#[derive(Clone, Debug)]
pub struct Question {
    /// Id and flags as they came.
    pub(crate) metadata: Metadata,
    /// The question as it came, letter case included: clients compare it (0x20).
    pub(crate) query: Query,
    /// Whether the query had EDNS, and the size of UDP answer that it takes.
    pub(crate) edns: Option<u16>,
}

/// Bytes that are not such a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// Not even a header, or a response: no answer, so that nobody is made to answer himself.
    Silent,
    /// To be answered with a header and this code alone.
    Refused {
        /// Id and flags as they came.
        metadata: Metadata,
        /// FORMERR, NOTIMP, REFUSED or BADVERS.
        code: ResponseCode,
    },
}

impl Question {
    /// Reads one query.
    ///
    /// # Errors
    /// No header or a response: silent. Another opcode: NOTIMP. Not exactly one question, records
    /// beside it, more than one OPT, garbage: FORMERR. EDNS of another version: BADVERS. Another
    /// class than IN: REFUSED.
    pub fn read(bytes: &[u8]) -> Result<Self, Unreadable> {
        let header = Header::from_bytes(bytes).map_err(|_| Unreadable::Silent)?;
        let metadata = header.metadata;
        if metadata.message_type != MessageType::Query {
            return Err(Unreadable::Silent);
        }
        let refused = |code| Unreadable::Refused { metadata, code };
        if metadata.op_code != OpCode::Query {
            return Err(refused(ResponseCode::NotImp));
        }
        let counts = header.counts;
        if bytes.len() > MAX_QUERY
            || (counts.queries, counts.answers, counts.authorities) != (1, 0, 0)
        {
            return Err(refused(ResponseCode::FormErr));
        }
        let message = Message::from_vec(bytes).map_err(|_| refused(ResponseCode::FormErr))?;
        let query = message.queries.into_iter().next().ok_or(refused(ResponseCode::FormErr))?;
        if message.edns.as_ref().is_some_and(|edns| edns.version() != 0) {
            return Err(refused(ResponseCode::BADVERS));
        }
        if query.query_class != DNSClass::IN {
            return Err(refused(ResponseCode::Refused));
        }
        Ok(Self { metadata, query, edns: message.edns.as_ref().map(Edns::max_payload) })
    }

    /// The name that is asked for, if it can be a host's.
    #[must_use]
    pub fn host(&self) -> Option<Host> {
        Host::parse(&text(&self.query.name)?).ok()
    }

    /// The name as sent: escaped, and fit for a record.
    #[must_use]
    pub fn shown(&self) -> String {
        policy::audit::shown(&self.query.name.to_ascii())
    }

    /// The record type that is asked for.
    #[must_use]
    pub fn record_type(&self) -> RecordType {
        self.query.query_type
    }
}

/// The labels joined by dots, when no label holds a byte that would read as something else.
fn text(name: &Name) -> Option<String> {
    let mut text = String::with_capacity(255);
    for label in name {
        let label = str::from_utf8(label).ok()?;
        if !label.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte)) {
            return None;
        }
        if !text.is_empty() {
            text.push('.');
        }
        text.push_str(label);
    }
    Some(text)
}
