//! Hellos built to be misread: names, lists, lengths, versions, records, sizes. The numbers are those
//! of the attack table the design keeps.

use egress::sniff::{Ech, Flaw, MAX_FLIGHT, MAX_RECORDS, Sni, Sniffed, sniff};
use policy::{Code, Host};

use crate::bytes::{
    NAME, byte_by_byte, extension, hello_with, in_records, message, named, read, record, sni_of,
    vec16,
};

/// Attacks D12, D14, D15, D16, D17, D25.
#[test]
fn a_name_is_a_host_name_or_nothing() {
    let cases: &[(&[u8], Result<&str, Code>)] = &[
        (b"API.Example.TEST", Ok(NAME)),
        (b"a_b.example.test", Ok("a_b.example.test")),
        (b"evil.test\0.example.test", Err(Code::BadName)),
        (b"evil.test\n.example.test", Err(Code::BadName)),
        (b"evil.test .example.test", Err(Code::BadName)),
        (b"evil.test/.example.test", Err(Code::BadName)),
        (b"*.example.test", Err(Code::BadName)),
        (b"../../x", Err(Code::BadName)),
        (b"$(reboot).example.test", Err(Code::BadName)),
        (b"b\xc3\xbccher.example", Err(Code::BadName)),
        (b"\xff\xfe.example", Err(Code::BadName)),
        (b"xn--example-.org", Err(Code::BadName)),
        (b"a..example.test", Err(Code::BadName)),
        (b".example.test", Err(Code::BadName)),
        (b".", Err(Code::BadName)),
        (&[b'a'; 64], Err(Code::BadName)),
        (&[b'a'; 300], Err(Code::BadName)),
        (b"1.2.3.4", Err(Code::NoName)),
        (b"127.1", Err(Code::NoName)),
        (b"2130706433", Err(Code::NoName)),
        (b"0x7f000001", Err(Code::NoName)),
        (b"0177.0.0.1", Err(Code::NoName)),
        (b"::1", Err(Code::NoName)),
        (b"[::1]", Err(Code::NoName)),
    ];
    for (name, expected) in cases {
        let hello = read(&hello_with(&sni_of(name)));
        let got = hello.sni.host().map(Host::as_str);
        assert_eq!(got, *expected, "{}", name.escape_ascii());
    }
}

/// Attack D06.
#[test]
fn a_hello_without_a_name_has_none() {
    for flight in [hello_with(&[]), hello_with(&extension(0x1a1a, &[]))] {
        assert_eq!(read(&flight).sni, Sni::Absent);
    }
    // TLS 1.2 allows a hello that ends before the extensions.
    let mut body = message([3, 3], &[]);
    body.truncate(body.len() - 2);
    body[3] -= 2;
    assert_eq!(read(&record(22, 1, &body)).sni.host(), Err(Code::NoName));
}

/// Attack D07.
#[test]
fn a_name_list_holds_exactly_one_host_name() {
    let host = [&[0][..], &vec16(NAME.as_bytes())].concat();
    let other = [&[0][..], &vec16(b"evil.test")].concat();
    let unknown = [&[1][..], &vec16(b"x")].concat();
    for list in [
        vec![],
        [&host[..], &other].concat(),
        [&host[..], &host].concat(),
        [&unknown[..], &host].concat(),
        [&host[..], &unknown].concat(),
        unknown,
    ] {
        let flight = hello_with(&extension(0, &vec16(&list)));
        assert_eq!(sniff(&flight), Sniffed::Undecidable(Flaw::NameList), "{list:?}");
    }
    let twice = [sni_of(NAME.as_bytes()), extension(0x2a2a, &[]), sni_of(b"evil.test")].concat();
    assert_eq!(sniff(&hello_with(&twice)), Sniffed::Undecidable(Flaw::DuplicateExtension));
    let twice = [extension(0x2a2a, &[]), extension(0x2a2a, &[])].concat();
    assert_eq!(sniff(&hello_with(&twice)), Sniffed::Undecidable(Flaw::DuplicateExtension));
}

/// Attack D09.
#[test]
fn a_length_that_lies_is_never_believed() {
    // One byte too many or too few at each place that has a length.
    let good = hello_with(&sni_of(NAME.as_bytes()));
    assert_eq!(read(&good).sni, named());
    let sni = good.len() - sni_of(NAME.as_bytes()).len();
    // handshake, session, suites, compression, extensions, extension, list, name
    for at in [8, 43, 45, 48, 50, sni + 3, sni + 5, sni + 8] {
        for change in [1, 0xff, 0x80] {
            let mut flight = good.clone();
            flight[at] = flight[at].wrapping_add(change);
            // A longer message is only known to be short when its next record does not come.
            let verdict = sniff(&flight);
            let waits = at == 8 && verdict == Sniffed::NeedMore;
            assert!(waits || matches!(verdict, Sniffed::Undecidable(_)), "{at}: {verdict:?}");
        }
    }
    let trailing = record(22, 1, &[&good[5..], &[0][..]].concat());
    assert_eq!(sniff(&trailing), Sniffed::Undecidable(Flaw::Malformed));
    let data = [&vec16(&[&[0][..], &vec16(NAME.as_bytes())].concat())[..], &[0]].concat();
    let inner = hello_with(&extension(0, &data));
    assert_eq!(sniff(&inner), Sniffed::Undecidable(Flaw::Malformed));
}

/// Attacks D11, D20.
#[test]
fn only_tls_1_2_and_later_are_read() {
    for version in [[3, 0], [3, 1], [3, 2], [3, 4], [2, 0], [0xfe, 0xfd]] {
        let flight = record(22, 1, &message(version, &sni_of(NAME.as_bytes())));
        assert_eq!(sniff(&flight), Sniffed::Undecidable(Flaw::Version), "{version:?}");
    }
    let offering = |versions: &[u8]| {
        let length = u8::try_from(versions.len()).expect("a short list");
        hello_with(&extension(43, &[&[length][..], versions].concat()))
    };
    assert!(read(&offering(&[0x1a, 0x1a, 3, 4, 3, 3])).tls13);
    assert!(read(&offering(&[3, 4])).tls13);
    assert!(!read(&offering(&[3, 3, 3, 2])).tls13);
    assert_eq!(sniff(&offering(&[3, 2, 3, 1])), Sniffed::Undecidable(Flaw::Version));
    assert_eq!(sniff(&offering(&[0x1a, 0x1a])), Sniffed::Undecidable(Flaw::Version));
    assert_eq!(sniff(&offering(&[])), Sniffed::Undecidable(Flaw::Malformed));
    assert_eq!(sniff(&offering(&[3, 4, 3])), Sniffed::Undecidable(Flaw::Malformed));
    assert_eq!(sniff(&[0x80, 0x2e, 1, 0, 2, 0, 0x15]), Sniffed::Undecidable(Flaw::Sslv2));
    assert_eq!(sniff(&[0x80, 0x2e, 1, 3, 1]), Sniffed::Undecidable(Flaw::Sslv2));
}

/// Attack D02.
#[test]
fn records_are_of_a_kind_a_version_and_a_length_that_clients_send() {
    let whole = message([3, 3], &sni_of(NAME.as_bytes()));
    let (head, tail) = whole.split_at(20);
    for minor in 0..=4 {
        assert_eq!(read(&record(22, minor, &whole)).sni, named());
    }
    let between = |inserted: &[u8]| {
        sniff(&[&record(22, 1, head)[..], inserted, &record(22, 3, tail)].concat())
    };
    assert_eq!(between(&[]), sniff(&record(22, 1, &whole)));
    let alert = record(21, 3, &[1, 0]);
    let change = record(20, 3, &[1]);
    let cases: &[(&[u8], Flaw)] = &[
        (&alert, Flaw::RecordType),
        (&change, Flaw::RecordType),
        (&record(23, 3, b"x"), Flaw::RecordType),
        (&record(22, 3, &[]), Flaw::RecordLength),
        (&[22, 3, 3, 0x40, 0x01], Flaw::RecordLength),
        (&record(22, 5, b"x"), Flaw::RecordVersion),
        (&[22, 2, 0, 0, 1, 0], Flaw::RecordVersion),
        (b"GET / ", Flaw::RecordType),
    ];
    for &(inserted, flaw) in cases {
        assert_eq!(between(inserted), Sniffed::Undecidable(flaw), "{inserted:?}");
    }
    assert_eq!(sniff(&alert), Sniffed::Undecidable(Flaw::RecordType));
    assert_eq!(sniff(&change), Sniffed::Undecidable(Flaw::RecordType));
    assert_eq!(sniff(&record(22, 3, &[])), Sniffed::Undecidable(Flaw::RecordLength));
    assert_eq!(sniff(&record(22, 3, &[2])), Sniffed::Undecidable(Flaw::NotClientHello));
}

/// Attacks D04, P06.
#[test]
fn a_hello_has_a_bound_in_bytes_records_and_parts() {
    // A name behind a large key share is found...
    let share = extension(51, &[0; 4000]);
    let far = [share, sni_of(NAME.as_bytes())].concat();
    assert_eq!(read(&in_records(&message([3, 3], &far), 1400)).sni, named());
    // ...up to a bound.
    assert_eq!(sniff(&record(22, 1, &[1, 1, 0, 0])), Sniffed::Undecidable(Flaw::TooLong));
    let padded = |size| {
        let fill = extension(21, &vec![0; size]);
        in_records(&message([3, 3], &fill), 1 << 14)
    };
    assert!(matches!(sniff(&padded(MAX_FLIGHT - 200)), Sniffed::Tls(_)));
    assert_eq!(sniff(&padded(MAX_FLIGHT - 70)), Sniffed::Undecidable(Flaw::TooLong));
    let crumbs = |length: u16| {
        let fill = extension(21, &vec![0; usize::from(length)]);
        let message = message([3, 3], &fill);
        (message.len(), sniff(&in_records(&message, 1)))
    };
    let (records, verdict) = crumbs(MAX_RECORDS - 51);
    assert_eq!(records, usize::from(MAX_RECORDS));
    assert!(matches!(verdict, Sniffed::Tls(_)));
    assert_eq!(crumbs(MAX_RECORDS - 50).1, Sniffed::Undecidable(Flaw::TooManyRecords));
    let many = (0..129).flat_map(|kind| extension(0x8000 + kind, &[])).collect::<Vec<_>>();
    assert_eq!(sniff(&hello_with(&many)), Sniffed::Undecidable(Flaw::TooMany));
    let alpn = extension(16, &vec16(&[1, b'x'].repeat(17)));
    assert_eq!(sniff(&hello_with(&alpn)), Sniffed::Undecidable(Flaw::TooMany));
    let alpn = extension(16, &vec16(&[1, b'x'].repeat(16)));
    assert_eq!(read(&hello_with(&alpn)).alpn.len(), 16);
}

/// Attack D19.
#[test]
fn an_encrypted_hello_is_noted_with_its_kind() {
    let outer = [&[0, 0, 1, 0, 1, 9][..], &vec16(&[1; 32]), &vec16(&[2; 64])].concat();
    assert_eq!(read(&hello_with(&extension(0xfe0d, &outer))).ech, Some(Ech::Outer));
    assert_eq!(read(&hello_with(&extension(0xfe0d, &[1]))).ech, Some(Ech::Inner));
    for data in [&[][..], &[2], &[1, 0], &outer[..outer.len() - 1]] {
        let flight = hello_with(&extension(0xfe0d, data));
        assert_eq!(sniff(&flight), Sniffed::Undecidable(Flaw::Malformed), "{data:?}");
    }
}

/// Attack D10.
#[test]
fn http_is_told_by_its_request_line_and_nothing_else_is() {
    let cases: &[(&[u8], Sniffed)] = &[
        (b"", Sniffed::NeedMore),
        (b"G", Sniffed::NeedMore),
        (b"GET", Sniffed::NeedMore),
        (b"GET ", Sniffed::NeedMore),
        (b"GET /", Sniffed::Http),
        (b"get /", Sniffed::Http),
        (b"GET http", Sniffed::Http),
        (b"GET HTTP", Sniffed::Http),
        (b"GET ht", Sniffed::NeedMore),
        (b"GET hx", Sniffed::NeedMore),
        (b"GET hx\r\n", Sniffed::Other),
        (b"OPTIONS *", Sniffed::Http),
        (b"M-SEARCH *", Sniffed::Http),
        (b"CONNECT evil.test:443 HTTP/1.1", Sniffed::Http),
        (b"\r\n\r\nGET /", Sniffed::Http),
        (&[b'\n'; 15], Sniffed::NeedMore),
        (&[b'\n'; 40], Sniffed::Http),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Sniffed::Http2),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0", Sniffed::Http2),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r", Sniffed::NeedMore),
        (b"PRI * HTTP/1.1", Sniffed::Http),
        (b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", Sniffed::Other),
        (b"EHLO example.test\r\n", Sniffed::Other),
        (b"0032git-upload-pack /project.git\0", Sniffed::Other),
        (b"*1\r\n$4\r\nPING\r\n", Sniffed::Other),
        (b"CONNECT\r\naccept-version:1.2\r\n", Sniffed::Other),
        (b"AMQP\0\0\x09\x01", Sniffed::Other),
        (b"8=FIX.4.2\x019=61\x01", Sniffed::Other),
        (b"<stream:stream to='x' version='1.0'>", Sniffed::Other),
        (b"get key\r\n", Sniffed::Other),
        (b"\"get\" 1\r\n", Sniffed::Other),
        (b"\x1cget key\r\n", Sniffed::Other),
        (b"\x1c\0\0\0HTTP/1.1\r\n", Sniffed::Other),
        (b"\"\0\0\0HTTP/1.1\r\n", Sniffed::Other),
        (b"\xef\xbb", Sniffed::NeedMore),
        (b"\xef\xbb\xbfget key\r\n", Sniffed::Other),
        (b"\xef\xbb\xbe", Sniffed::NeedMore),
        (b"\r\n\xef\xbf", Sniffed::NeedMore),
        (b"\xc2\x85GET /x HTTP/1.1\r\n", Sniffed::Http),
        (b"(GET /x HTTP/1.1\r\n", Sniffed::Http),
        (b"{\tGET /x http/1.1\r\n", Sniffed::Http),
        (b"{GET\ta\tb /x HTTP/1.1\r\n", Sniffed::Http),
        (b"(GET /x H", Sniffed::NeedMore),
        (b"(GET /x T", Sniffed::Other),
        (b"{\"id\": 1, \"method\": \"x\"}", Sniffed::Other),
        (b"{\"id\":1}\r\n", Sniffed::Other),
        (b"<?xml version='1.0'?><stream:stream", Sniffed::NeedMore),
        (b"<?xml version='1.0'?><stream:stream to=", Sniffed::Other),
        (b"NICK me\r\nUSER me 0 * :me\r\n", Sniffed::Other),
        (b"OPTIONS rtsp://a.example RTSP/1.0\r\n", Sniffed::Other),
        (&[0x16], Sniffed::NeedMore),
        (&[0x80, 0x2e], Sniffed::NeedMore),
        (&[0x80, 0x2e, 0x02], Sniffed::Other),
        (&[0x80, 0x2e, 0x01, 0x00, 0x03], Sniffed::Other),
        (&[0, 0, 0, 8, 4, 0xd2, 0x16, 0x2f], Sniffed::Other),
        (&[b'A'; 32], Sniffed::NeedMore),
        (&[b'A'; 8191], Sniffed::NeedMore),
        (&[b'A'; 8192], Sniffed::Http),
    ];
    for (flight, expected) in cases {
        assert_eq!(sniff(flight), *expected, "{}", flight.escape_ascii());
        assert_eq!(byte_by_byte(flight), *expected, "{}", flight.escape_ascii());
    }
}

/// Attacks D10, E27. nginx, haproxy, node, gunicorn, waitress or Python's `http.server` read each of
/// these as a request: as bytes of something else it would pass unread.
#[test]
fn what_lenient_servers_read_as_a_request_is_http() {
    let lines: &[&[u8]] = &[
        b"GET  /",
        b"GET\t/",
        b" GET /",
        b" \r\n\tGET /",
        b"GET\x0b/",
        b"GET \x0c/",
        b"GET x://evil.test/ HTTP/1.1\r\n",
        b"GET a HTTP/1.1\n",
        b"GET ?a http/1.1\n",
        b"GET \xe9 HTTP/1.1\r\n",
        b"!GET / HTTP/1.1\r\n",
        b"0GET / HTTP/1.1\r\n",
        b"G(T / HTTP/1.1\r\n",
        b"G\x01T / HTTP/1.1\r\n",
        b"GET \0/ HTTP/1.1\r\n",
        b"\"GET / HTTP/1.1\r\n",
        b"\r\n\"GET / http/1.0\n",
        b"\xef\xbb\xbfGET / HTTP/1.1\r\n",
        b" \xef\xbb\xbf\"GET / HTTP/1.1\r\n",
        b"\xef\xbb\xbfG\x01T / HTTP/1.1\r\n",
        b"\x0bGET /",
        b"\x1c\x1f\x85\xa0GET /",
        b"\r\n\xa0!GET / HTTP/1.1\r\n",
        b"GET\r/",
        b"GET\x1d/",
        b"GET\x85\xa0/",
        b"AMETHODWITHMORELETTERSTHANANYTHATISREGISTERED /",
    ];
    for line in lines {
        assert_eq!(sniff(line), Sniffed::Http, "{}", line.escape_ascii());
        assert_eq!(byte_by_byte(line), Sniffed::Http, "{}", line.escape_ascii());
        let (_, unfinished) = line.split_last().expect("not empty");
        assert_eq!(sniff(unfinished), Sniffed::NeedMore, "{}", unfinished.escape_ascii());
    }
}

/// Attack D11. Servers of Java answer such hellos, in whatever record they come, and those of Go most.
#[test]
fn a_hello_in_a_record_of_no_version_of_tls_is_not_taken_for_other_bytes() {
    let undecidable = Sniffed::Undecidable(Flaw::RecordVersion);
    for version in [[0, 0], [2, 1], [4, 0], [0x0f, 0xff], [0x20, 1]] {
        let whole = hello_with(&sni_of(NAME.as_bytes()));
        let message = message([3, 3], &sni_of(NAME.as_bytes()));
        let alert = record(21, 3, &[1, 0]);
        let change = record(20, 3, &[1]);
        for mut flight in [whole, in_records(&message, 1), alert, change] {
            flight[1..3].copy_from_slice(&version);
            assert_eq!(sniff(&flight), undecidable, "{version:?}");
            assert_eq!(byte_by_byte(&flight), undecidable, "{version:?}");
            assert_eq!(sniff(&flight[..5]), Sniffed::NeedMore);
        }
    }
    for other in [&[0x16, 1, 0, 0, 0, 0][..], &[0x15, 0, 0, 0, 9, 1], &[0x16, 2, 0, 0, 7, 2]] {
        assert_eq!(sniff(other), Sniffed::Other, "{other:?}");
    }
}

/// Promise 13. Found by the fuzzer: what stood behind the first line counted as words of it.
#[test]
fn what_comes_behind_a_first_line_does_not_change_what_it_is() {
    for (flight, expected) in [
        (&b"\xff\x68\xeb HTTP/2.0\r\nTRI .I .\n J\n"[..], Sniffed::Http),
        (b"(GET /a HTTP/1.1\nHost: b c d\n", Sniffed::Http),
        (b"(a b c d\nGET / HTTP/1.1\n", Sniffed::Other),
    ] {
        let line = flight.iter().position(|byte| *byte == b'\n').expect("a line") + 1;
        assert_eq!(byte_by_byte(flight), expected, "{flight:?}");
        assert_eq!(sniff(flight), expected, "{flight:?}");
        assert_eq!(sniff(&flight[..line]), expected, "{flight:?}");
    }
}
