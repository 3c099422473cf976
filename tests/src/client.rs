//! What a program in a guest does with sockets, for tests that must see the bytes and the errors.
//! Called inside a guest's namespace; knows nothing of the router.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use hickory_proto::op::{Edns, Message, Query};
use hickory_proto::rr::{Name, RecordType};
use rustls::ClientConnection;
use socket2::{Domain, Protocol, Socket, Type};

use crate::ca::Authority;

/// A refusal is immediate; this bound only catches hangs. See [`at_once`].
pub const AT_ONCE: Duration = Duration::from_secs(1);

/// How often a busy machine may be late.
const TRIES: usize = 3;

/// Longer than anything allowed takes on a busy machine, and than that ever stands still.
pub const PATIENT: Duration = Duration::from_secs(30);

/// A fatal TLS alert `access_denied` (RFC 8446 section 6, code 49).
pub const ACCESS_DENIED: [u8; 2] = [2, 49];

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By an orderly end of input.
    Closed,
    /// By a reset.
    Reset,
    /// Not at all within the time.
    Open,
}

/// What came back on a connection.
#[derive(Clone, Debug)]
pub struct Reply {
    /// All bytes until the end.
    pub bytes: Vec<u8>,
    /// How it ended.
    pub end: End,
    /// From the first byte sent to the end.
    pub took: Duration,
}

impl Reply {
    /// The level and description of a TLS alert record, if the reply is one.
    #[must_use]
    pub fn alert(&self) -> Option<[u8; 2]> {
        match self.bytes[..] {
            [21, 3, _, 0, 2, level, description, ..] => Some([level, description]),
            _ => None,
        }
    }

    /// As text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

/// What `act` gives within [`AT_ONCE`]; tried again when it took longer, since the machine may be busy.
///
/// # Panics
/// When it was late every time.
pub fn at_once<T>(mut act: impl FnMut() -> T) -> T {
    let mut late = Vec::new();
    while late.len() < TRIES {
        let start = Instant::now();
        let done = act();
        match start.elapsed() {
            took if took < AT_ONCE => return done,
            took => late.push(took),
        }
    }
    panic!("not at once: {late:?}");
}

/// A connection, made within `limit`, with read and write limits of [`PATIENT`].
///
/// # Errors
/// As the kernel answers: refused, reset, unreachable, timed out.
pub fn connect(to: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
    socket.connect_timeout(&to.into(), limit)?;
    let stream = TcpStream::from(socket);
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENT))?;
    stream.set_write_timeout(Some(PATIENT))?;
    Ok(stream)
}

/// Connects, sends `pieces` one segment each, reads until the end or until `limit` after the last.
///
/// # Panics
/// When it cannot connect, but for a refusal: that is an answer like any other.
#[must_use]
pub fn exchange(to: SocketAddr, pieces: &[&[u8]], limit: Duration) -> Reply {
    exchange_until(to, pieces, limit, |_| false)
}

/// The same, but it stops to read as soon as the reply so far is `enough`.
///
/// # Panics
/// As [`exchange`].
#[must_use]
pub fn exchange_until(
    to: SocketAddr,
    pieces: &[&[u8]],
    limit: Duration,
    enough: impl Fn(&[u8]) -> bool,
) -> Reply {
    let start = Instant::now();
    let mut bytes = Vec::new();
    let mut stream = match connect(to, PATIENT) {
        Ok(stream) => stream,
        // A reset may be faster than the end of the handshake is noticed.
        Err(e) if refused(&e) => return Reply { bytes, end: End::Reset, took: start.elapsed() },
        Err(e) => panic!("connect to {to}: {e}"),
    };
    let start = Instant::now();
    let cut = pieces.iter().any(|piece| stream.write_all(piece).is_err());
    let mut end = read_until(&mut stream, &mut bytes, limit, enough);
    if cut && end == End::Closed {
        // The failed write has taken the error; the read finds only that it is over.
        end = End::Reset;
    }
    Reply { bytes, end, took: start.elapsed() }
}

/// Whether these bytes hold the whole head of an HTTP message.
#[must_use]
pub fn has_head(bytes: &[u8]) -> bool {
    bytes.windows(4).any(|four| four == b"\r\n\r\n")
}

/// Whether a TLS server has begun to answer a hello: with a handshake record (RFC 8446 section 5.1,
/// type 22), and not with an alert.
#[must_use]
pub fn has_handshake(bytes: &[u8]) -> bool {
    bytes.first() == Some(&22)
}

fn refused(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset)
}

/// Reads until the end, or until `limit` has passed.
///
/// # Panics
/// When the socket refuses a read timeout.
pub fn read_to_end(stream: &mut TcpStream, bytes: &mut Vec<u8>, limit: Duration) -> End {
    read_until(stream, bytes, limit, |_| false)
}

fn read_until(
    stream: &mut TcpStream,
    bytes: &mut Vec<u8>,
    limit: Duration,
    enough: impl Fn(&[u8]) -> bool,
) -> End {
    let deadline = Instant::now() + limit;
    let mut buffer = vec![0; 1 << 16];
    while !enough(bytes) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return End::Open;
        }
        stream.set_read_timeout(Some(left)).expect("read timeout");
        match stream.read(&mut buffer) {
            Ok(0) => return End::Closed,
            Ok(length) => bytes.extend_from_slice(&buffer[..length]),
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return End::Reset,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return End::Open,
        }
    }
    End::Open
}

/// A TLS client and the connection it will speak on.
///
/// # Panics
/// When `name` is not one a TLS client may say.
#[must_use]
pub fn tls(authority: &Authority, name: &str) -> ClientConnection {
    let name = name.to_owned().try_into().expect("a server name");
    ClientConnection::new(authority.client().into(), name).expect("a TLS client")
}

/// The bytes of a real first flight that says `name`.
///
/// # Panics
/// As [`tls`].
#[must_use]
pub fn client_hello(authority: &Authority, name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    tls(authority, name).write_tls(&mut bytes).expect("a ClientHello");
    bytes
}

/// A DNS query as a stub resolver sends it, with EDNS.
///
/// # Panics
/// When `name` is not a name.
#[must_use]
pub fn query(name: &str, kind: RecordType) -> Message {
    let mut query = Message::query();
    query.metadata.recursion_desired = true;
    query.add_query(Query::query(Name::from_ascii(name).expect("a name"), kind));
    let mut edns = Edns::new();
    edns.set_max_payload(1232);
    query.set_edns(edns);
    query
}

/// Asks over UDP, on a connected socket: an answer from another address is not heard.
///
/// # Errors
/// When nothing is heard within [`PATIENT`], or the answer is not one.
pub fn ask_udp(server: SocketAddr, query: &Message) -> io::Result<Message> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.connect(server)?;
    socket.set_read_timeout(Some(PATIENT))?;
    socket.send(&query.to_vec().map_err(io::Error::other)?)?;
    let mut reply = [0; 4096];
    let length = socket.recv(&mut reply)?;
    Message::from_vec(&reply[..length]).map_err(io::Error::other)
}

/// Asks over TCP.
///
/// # Errors
/// When it cannot connect, nothing is heard within [`PATIENT`], or the answer is not one.
///
/// # Panics
/// Never: a query is short.
pub fn ask_tcp(server: SocketAddr, query: &Message) -> io::Result<Message> {
    let mut stream = connect(server, PATIENT)?;
    let query = query.to_vec().map_err(io::Error::other)?;
    let length = u16::try_from(query.len()).expect("a short query");
    stream.write_all(&[&length.to_be_bytes()[..], &query].concat())?;
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut reply = vec![0; usize::from(u16::from_be_bytes(length))];
    stream.read_exact(&mut reply)?;
    Message::from_vec(&reply).map_err(io::Error::other)
}

/// The code of the extended error of a DNS reply and its text (RFC 8914).
#[must_use]
pub fn extended_error(reply: &Message) -> Option<(u16, String)> {
    use hickory_proto::rr::rdata::opt::{EdnsCode, EdnsOption};
    let option = reply.edns.as_ref()?.option(EdnsCode::Unknown(15))?;
    let EdnsOption::Unknown(_, data) = option else { return None };
    let (code, text) = data.split_at_checked(2)?;
    let code = u16::from_be_bytes(code.try_into().ok()?);
    Some((code, String::from_utf8_lossy(text).into_owned()))
}

/// The IPv4 addresses of a DNS reply.
#[must_use]
pub fn addresses(reply: &Message) -> Vec<std::net::Ipv4Addr> {
    let data = reply.answers.iter().map(|record| &record.data);
    data.filter_map(|data| match data {
        hickory_proto::rr::RData::A(a) => Some(a.0),
        _ => None,
    })
    .collect()
}
